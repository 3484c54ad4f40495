# SPDX-License-Identifier: Apache-2.0
"""A job explained: its command line checked once, and one of its ranks built per pipeline stage."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from megatron_ext.explain.child import in_child
from megatron_ext.explain.config import ExplainConfig
from megatron_ext.explain.rank_figures import JobFigures, RankFigures

__all__ = ["Explanation", "explain"]

_LARGE = ("megatron.training.training", "megatron_ext.explain.rank_survey", "torch._subclasses.fake_tensor")
"""What takes long to import."""

_BACKEND_LINE = "training runs on CPU with gloo"
"""The end of a line about this process."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A job and some of its ranks."""

    job: JobFigures
    """The job."""

    ranks: list[RankFigures]
    """The ranks that were built, in order."""

    @property
    def fullest(self) -> RankFigures:
        """The rank that needs the most memory on its device."""
        return max(self.ranks, key=lambda figures: figures.device_bytes)


def explain(asked: ExplainConfig) -> Explanation:
    """Explain a command line.

    Raises:
        UserError: it is not valid, or asks for something that cannot be built by itself.
        RuntimeError: building failed for another reason.
    """
    asked.check()
    # Once for all ranks, which are forks of this process.
    for module in _LARGE:
        importlib.import_module(module)
    first = in_child(_build, asked, asked.rank or 0)
    job, own, others = first.value
    ranks = [own]
    if asked.rank is None:
        ranks += [in_child(_build, asked, rank).value[1] for rank in others]
    job.notes[:0] = [line for line in first.lines if not line.endswith(_BACKEND_LINE)]
    job.lines.extend(_feature_lines(job, ranks))
    return Explanation(job=job, ranks=ranks)


def _feature_lines(job: JobFigures, ranks: list[RankFigures]) -> list[str]:
    """Return what features say once all ranks are known."""
    from megatron_ext.explain import of_hot_switch, of_local_sgd, peer_lines

    lines: list[str] = []
    if "local-sgd" in job.facts:
        lines += of_local_sgd.lines_of(
            job.facts["local-sgd"], ranks, stages=job.sizes["pp"], step_tokens=job.step_tokens
        )
    if "hot-switch" in job.facts:
        lines += of_hot_switch.lines_of(job.facts["hot-switch"])
    if "sync-service" in job.facts:
        lines += peer_lines.lines_of(job.facts["sync-service"], step_tokens=job.step_tokens * len(job.workers))
    return lines


def _build(asked: ExplainConfig, rank: int) -> tuple[JobFigures, RankFigures, list[int]]:
    """Build a rank in this process; return what is known of the job, of it, and a rank of each stage unlike its own.

    Raises:
        UserError: see `explain`.
    """
    from megatron_ext.activation import patch_to_explain
    from megatron_ext.explain.command_line import parse
    from megatron_ext.explain.lone_rank import build
    from megatron_ext.explain.rank_survey import survey

    patch_to_explain(asked.backend)
    args = parse(asked, rank)
    return survey(build(args), asked)
