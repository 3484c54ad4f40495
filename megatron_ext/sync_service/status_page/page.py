# SPDX-License-Identifier: Apache-2.0
"""The status page as HTML."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.sync_service.status_page.assets import SCRIPT, STYLE
from megatron_ext.sync_service.status_page.charts import COLOURS, ChartLine, bar_chart, line_chart, spread
from megatron_ext.sync_service.status_page.text import bytes_text, escape, figure_text, seconds_text
from megatron_ext.version import __version__

__all__ = ["page"]

_UPLOADED, _REDUCED, _WAITED = "#56a3d9", "#0072b2", "#c9d6e2"
_SHOWN_INCIDENTS = 20

_TAGS = {
    **dict.fromkeys(("rejected", "evicted", "damaged", "diverged"), "bad"),
    **dict.fromkeys(("left out", "left out for long", "late"), "warn"),
}
"""By kind of incident, how bad it is."""


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a server.

    Args:
        runs: what `overview_of` makes.
    """
    worst = ", ".join(f"{run['run']}: {run['health']['word']}" for run in runs)
    sections = "".join(map(_run, runs))
    made = f"megatron_ext {escape(__version__)} &middot; as of {_clock(time.time())} UTC"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<noscript><meta http-equiv="refresh" content="5"></noscript>
<link rel="icon" href="data:,">
<title>{escape(worst)}</title>
<style>{STYLE}</style>
</head>
<body>
<div id="away"></div>
<header><h1>Sync server</h1><p id="made">{made}</p></header>
<main>{sections}</main>
<footer>The same as data: <a href="status.json">status.json</a>, <a href="metrics">metrics</a>.</footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _run(run: Mapping[str, Any]) -> str:
    health = run["health"]
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in health["reasons"])
    waiting = run["waiting_for"]
    if waiting not in health["reasons"]:
        reasons += f"<p>{escape(waiting[:1].upper() + waiting[1:])}.</p>"
    return f"""
<section>
<div class="card health {escape(health["level"])}">
<h2>{escape(run["run"])}<span class="word">{escape(health["word"])}</span></h2>{reasons}
</div>
{_facts(run)}
<div class="card"><h3>Peers</h3>{_peers(run)}</div>
<div class="charts">{_charts(run)}</div>
<div class="card"><h3>What did not count, and who went</h3>{_incidents(run)}</div>
</section>"""


def _facts(run: Mapping[str, Any]) -> str:
    newest = run["rounds"][-1] if run["rounds"] else None
    if run["asynchronous"]:
        # A round is one contribution.
        latest = _newest_losses(run)
        losses = [latest[peer["peer"]] for peer in run["peers"] if peer["peer"] in latest]
        whose = "Mean of the latest losses"
    else:
        losses = list(newest["losses"].values()) if newest else []
        whose = "Mean loss in it"
    facts = [
        ("Open round", str(run["open_round"]), ""),
        ("Peers", f"{len(run['peers'])}/{run['places']}", "" if run["asynchronous"] else f"quorum {run['quorum']}"),
        ("Newest round", _ago(run, newest["time"]) if newest else "none", ""),
        (whose, figure_text(sum(losses) / len(losses)) if losses else "&ndash;", ""),
        ("Uploaded for that", bytes_text(newest["bytes"]) if newest else "&ndash;", ""),
        ("Model", bytes_text(run["model_bytes"]), "in fp32"),
    ]
    cells = (f"<div><span>{label}</span><b>{value}</b><small>{more}</small></div>" for label, value, more in facts)
    return f'<div class="facts">{"".join(cells)}</div>'


def _peers(run: Mapping[str, Any]) -> str:
    latest = {"losses": _newest_losses(run), "steps": _newest_steps(run)}
    latest["counted"] = {name: entry["round"] for entry in run["rounds"] for name in entry["contributors"]}
    rows = [_peer(run, peer, latest, *_state(run, peer), "") for peer in run["peers"]]
    here = {peer["peer"] for peer in run["peers"]}
    gone = {entry["peer"]: entry["kind"] for entry in run["incidents"] if entry["kind"] in ("evicted", "left")}
    for name, kind in gone.items():
        if name not in here and name in run["indices"]:
            peer = {"peer": name, "index": run["indices"][name], "bytes_uploaded": 0, "last_seen": None}
            rows.append(_peer(run, peer, latest, _TAGS.get(kind, ""), kind, "gone"))
    if not rows:
        return '<p class="none">no peer is here</p>'
    return (
        '<div class="scroll"><table><tr><th>peer</th><th class="number wide">index</th><th>state</th>'
        '<th class="number">last round</th><th class="number">loss</th><th class="number wide">steps</th>'
        '<th class="number wide">uploaded now</th><th class="number">last seen</th></tr>'
        f"{''.join(rows)}</table></div>"
    )


def _peer(
    run: Mapping[str, Any], peer: Mapping[str, Any], latest: Mapping[str, Any], tag: str, state: str, row: str
) -> str:
    """Return the row of a peer."""
    name = peer["peer"]
    counted, steps = (latest[key].get(name, "&ndash;") for key in ("counted", "steps"))
    loss = figure_text(latest["losses"][name]) if name in latest["losses"] else "&ndash;"
    uploaded = bytes_text(peer["bytes_uploaded"]) if peer["bytes_uploaded"] else "&ndash;"
    seen = _ago(run, peer["last_seen"]) if peer["last_seen"] is not None else "&ndash;"
    return (
        f'<tr class="{row}"><td class="text">{_swatch(_colour(peer["index"]))}{escape(name)}</td>'
        f'<td class="number wide">{peer["index"]}</td><td><span class="tag {tag}">{escape(state)}</span></td>'
        f'<td class="number">{counted}</td><td class="number">{loss}</td>'
        f'<td class="number wide">{steps}</td>'
        f'<td class="number wide">{uploaded}</td><td class="number">{seen}</td></tr>'
    )


def _state(run: Mapping[str, Any], peer: Mapping[str, Any]) -> tuple[str, str]:
    """Return (tag, words) for what a peer is doing."""
    if peer["uploaded"]:
        return "done", "uploaded"
    if peer["bytes_uploaded"]:
        return "", "uploading"
    if run["newest_round"] is None:
        return "", "registered"
    if not peer["awaited"]:
        return "warn", f"missed {peer['missed']}"
    return "", "training"


def _charts(run: Mapping[str, Any]) -> str:
    rounds = run["rounds"]
    made = [entry for entry in rounds if entry["period"] is not None]
    times = {
        entry["round"]: (
            min(entry["reduce_seconds"], entry["period"]),
            max(0.0, entry["period"] - entry["reduce_seconds"]),
        )
        for entry in made
    }
    parts = [("reduced by the server", _REDUCED), ("trained and awaited", _WAITED)]
    legend = "".join(f"{_swatch(colour)}{label}" for label, colour in parts)
    uploads = {entry["round"]: (entry["bytes"],) for entry in rounds}

    def lines(of: Sequence[Mapping[str, Any]], key: str) -> str:
        # Where every contribution is a round, no peer is in all of them.
        return line_chart(_lines(run, of, key), figure_text, bridged=run["asynchronous"])

    # The norm of the start is that of the values.
    later = [entry for entry in rounds if entry["round"] > 0]
    charts = [
        ("Training loss of each peer", "", lines(rounds, "losses")),
        ("Norm of each peer's pseudo-gradient", "", lines(later, "norms")),
        ("Uploaded for each round", "", bar_chart(uploads, [("uploaded", _UPLOADED)], bytes_text)),
        ("Duration of each round", legend, bar_chart(times, parts, seconds_text)),
    ]
    return "".join(
        f'<div class="card chart"><h3>{title}<span class="legend">{legend}</span></h3>{chart}</div>'
        for title, legend, chart in charts
    )


def _lines(run: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], key: str) -> list[ChartLine]:
    """Return a line per peer, in the order of their indices."""
    names = sorted({name for entry in rounds for name in entry[key]}, key=lambda name: (run["indices"][name], name))
    return spread(
        [
            ChartLine(
                label=name,
                colour=_colour(run["indices"][name]),
                values={entry["round"]: entry[key][name] for entry in rounds if name in entry[key]},
            )
            for name in names
        ]
    )


def _incidents(run: Mapping[str, Any]) -> str:
    if not run["incidents"]:
        return '<p class="none">nothing: every contribution has counted</p>'
    rows = []
    for entry in list(reversed(run["incidents"]))[:_SHOWN_INCIDENTS]:
        tag = _TAGS.get(entry["kind"], "")
        rows.append(
            f'<tr><td class="when">{_clock(entry["time"])}</td><td class="number wide">{entry.get("round", "")}</td>'
            f'<td class="text">{escape(entry["peer"])}</td>'
            f'<td><span class="tag {tag}">{escape(entry["kind"])}</span></td>'
            f'<td class="text">{escape(entry["reason"])}</td></tr>'
        )
    return (
        '<div class="scroll"><table><tr><th>time (UTC)</th><th class="number wide">round</th><th>peer</th><th>what</th>'
        f"<th>why</th></tr>{''.join(rows)}</table></div>"
    )


def _newest_steps(run: Mapping[str, Any]) -> dict[str, int]:
    return {name: steps for entry in run["rounds"] for name, steps in entry["steps"].items()}


def _newest_losses(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss of every peer in the newest round that it took part in, where it is finite and was given."""
    newest = {name: entry for entry in run["rounds"] for name in (*entry["contributors"], *entry["rejected"])}
    return {name: entry["losses"][name] for name, entry in newest.items() if name in entry["losses"]}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _swatch(colour: str) -> str:
    return f'<svg viewBox="0 0 10 10"><rect width="10" height="10" rx="2" fill="{colour}"/></svg>'


def _ago(run: Mapping[str, Any], then: float) -> str:
    """Return how long ago something was; a moment ago when it was this one."""
    seconds = max(0.0, run["time"] - then)
    return "just now" if seconds < 1 else f"{seconds_text(round(seconds))} ago"


def _clock(then: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(then))
