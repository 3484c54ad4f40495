# SPDX-License-Identifier: Apache-2.0
"""The support page: the table of options (`megatron_ext.options`) as Markdown, for people.

`python -m megatron_ext.support` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.options import FEATURES, ROWS, OptionVerdict
from megatron_ext.options.default_rules import DEFAULT_RULES

__all__ = ["markdown"]


def markdown() -> str:
    """Return the table for the documentation."""
    lines = [
        "# Megatron options: supported, or refused by name",
        "",
        "A supported option names the test that runs it; one that is refused, or needs a GPU, ends the run at its",
        "start with the sentence below. This file is written by `python -m megatron_ext.support >",
        "docs/support-table.md`, from the rows in `megatron_ext/options`.",
    ]
    for feature, where in FEATURES.items():
        lines += ["", f"## {where[0].upper()}{where[1:]}", "", *_section(feature)]
    lines += ["", "## What all peers of a run share", "", "A peer whose value is another one is refused, by name.", ""]
    lines += [f"- `{row.option}`" for row in ROWS if row.peers_share]
    lines += ["", "## Other defaults on CPU", ""]
    lines += [f"- `{row.option}`" for row in ROWS if row.cpu_default]
    lines += ["", "## Options without a row", "", "Every feature accepts them, and no test is named for any.", ""]
    for rule in DEFAULT_RULES:
        which = [f"`{pattern}`" for pattern in rule.patterns] + [f"the group '{title}'" for title in rule.groups]
        lines.append(f"- Because {rule.reason}: {', '.join(which)}.")
    return "\n".join(lines) + "\n"


def _section(feature: str) -> Iterator[str]:
    """Yield the lines on a feature."""
    verdicts = list(_verdicts(feature))
    told = [(option, verdict) for option, verdict in verdicts if verdict.status not in _UNTOLD]
    if told:
        yield from ("| option | status | test, or reason and way out |", "|---|---|---|")
    for option, verdict in told:
        detail = f"`{verdict.tested_by}`" if verdict.tested_by else f"{verdict.reason}; {verdict.way_out}"
        yield f"| `{option}` | {verdict.status} | {detail} |"
    accepted: dict[str, list[str]] = {}
    for option, verdict in verdicts:
        if verdict.status == "accepted":
            accepted.setdefault(verdict.reason, []).append(f"`{option}`")
    for reason, options in accepted.items():
        yield from ("", f"Accepted without a test that is named, because {reason}: {', '.join(options)}.")
    for other in dict.fromkeys(verdict.feature for _, verdict in verdicts if verdict.status == "like another"):
        yield from ("", f"Of all other options holds what is said of a run {FEATURES[other]}.")


_UNTOLD = ("accepted", "like another")


def _verdicts(feature: str) -> Iterator[tuple[str, OptionVerdict]]:
    """Yield every option with its verdict, and again under each circumstance in which it has another one."""
    for row in ROWS:
        verdict = row.verdicts[feature]
        yield row.option, verdict
        for circumstance, other in verdict.exceptions.items():
            yield f"{row.option} with {circumstance}", other


if __name__ == "__main__":
    print(markdown(), end="")
