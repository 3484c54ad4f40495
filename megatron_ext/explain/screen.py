# SPDX-License-Identifier: Apache-2.0
"""An explanation for people: one screen."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.explain.explanation import Explanation
from megatron_ext.explain.rank_figures import JobFigures, RankFigures
from megatron_ext.explain.units import count, gigabytes, ranges

__all__ = ["lines"]

_LISTED_WORKERS = 4

Row = tuple[str, int, bool]
"""A cause, its bytes, and whether they are by a formula."""


def lines(found: Explanation) -> Iterator[str]:
    """Yield the lines."""
    job, fullest = found.job, found.fullest
    yield from _job(job)
    yield from _parameters(job, found.ranks)
    yield from job.lines
    sections = [_memory(found), _traffic(fullest)]
    if job.checkpoint:
        sections.append(_checkpoint(job))
    width = max(len(name) for _, rows, _ in sections for name, _, _ in rows)
    for title, rows, rest in sections:
        yield ""
        yield title
        for name, nbytes, by_formula in rows:
            yield f"  {name:<{width}} {'~' if by_formula else ' '} {gigabytes(nbytes):>12}"
        yield from rest
    yield ""
    by_cause = ", ".join(f"{name} {number}" for name, number in job.patches.items())
    yield f"{sum(job.patches.values())} patches ({by_cause}); `megatron-ext patches` lists them"
    yield "~ by a formula of docs/explain.md; all else was counted on the rank as Megatron builds it"
    for note in job.notes:
        yield f"note: {note}"


def _job(job: JobFigures) -> Iterator[str]:
    sizes = job.sizes
    shown = [f"{name.upper()} {sizes[name]}" for name in ("tp", "pp", "cp", "ep", "dp")]
    if sizes["vpp"] > 1:
        shown.insert(2, f"VPP {sizes['vpp']}")
    if sizes["etp"] != sizes["tp"]:
        shown.append(f"ETP {sizes['etp']}")
    features = ", ".join(job.features) or "stock Megatron"
    yield f"valid: {sizes['world']} ranks, {', '.join(shown)}; {features}"
    if len(job.workers) > 1:
        shown = [f"worker {index}: ranks {ranges(ranks)}" for index, ranks in enumerate(job.workers)]
        if len(shown) > _LISTED_WORKERS:
            shown = [*shown[: _LISTED_WORKERS - 1], "...", shown[-1]]
        yield f"{len(job.workers)} workers of {len(job.workers[0])} ranks: {'; '.join(shown)}"
    of = "a step of a worker" if len(job.workers) > 1 else "a step"
    yield f"{of}: {job.step_tokens:,} tokens, {job.micro_batches} micro-batches on every data-parallel rank"


def _parameters(job: JobFigures, ranks: list[RankFigures]) -> Iterator[str]:
    if job.parameters is None:
        return
    active = ""
    if job.active_parameters not in (None, job.parameters):
        active = f", of which a token meets {count(job.active_parameters or 0)}"
    yield f"{count(job.parameters)} parameters{active}; a rank holds {max(figures.parameters for figures in ranks):,}"


def _memory(found: Explanation) -> tuple[str, list[Row], list[str]]:
    fullest, several = found.fullest, len(found.ranks) > 1
    title = f"memory of rank {fullest.rank}, {_stages(fullest, found.job)}"
    rows = [
        (use.cause + (" (host)" if use.place == "host" else ""), use.nbytes, use.by_formula) for use in fullest.memory
    ]
    rows.append(("together on the device", fullest.device_bytes, False))
    if fullest.host_bytes:
        rows.append(("together on the host", fullest.host_bytes, False))
    others = [
        f"  rank {figures.rank}, {_stages(figures, found.job)}: {gigabytes(figures.device_bytes)}, "
        f"{count(figures.parameters)} parameters"
        for figures in found.ranks
        if figures is not fullest
    ]
    return title + (", the fullest" if several else ""), rows, others


def _traffic(figures: RankFigures) -> tuple[str, list[Row], list[str]]:
    rows = [
        (
            f"per {'step' if use.per == 'step' else 'round'}: {use.cause}",
            use.nbytes,
            use.by_formula,
        )
        for use in figures.traffic
    ]
    return f"bytes that rank {figures.rank} sends, and receives from a server", rows, [] if rows else ["  none"]


def _checkpoint(job: JobFigures) -> tuple[str, list[Row], list[str]]:
    rows = [(part.content, part.nbytes, False) for part in job.checkpoint]
    rows.append(("together", sum(part.nbytes for part in job.checkpoint), False))
    return "a checkpoint (torch_dist) of all ranks", rows, []


def _stages(figures: RankFigures, job: JobFigures) -> str:
    if job.sizes["pp"] == 1:
        return "one stage"
    return f"stage{'s' * (len(figures.stages) > 1)} {ranges(figures.stages)} of {job.sizes['pp']}"
