# SPDX-License-Identifier: Apache-2.0
"""Makes the report of a round from what it worked on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ext.local_sgd.exchange.rounds import Decision, RoundState
from megatron_ext.local_sgd.reporting.round_report import RoundReport
from megatron_ext.outer.lasting import lasting_remarks

__all__ = ["summarize"]


def summarize(
    state: RoundState,
    *,
    fragment: int,
    units: Sequence[str],
    decisions: Sequence[Decision],
    bytes_sent: int,
) -> RoundReport:
    """Return the report of a round that has just ended.

    Args:
        state: what it worked on.
        fragment: which part of the model it moved.
        units: the units of that part.
        decisions: what was decided over each; nothing for the plain mean.
        bytes_sent: by this rank.
    """
    *by_worker, common = state.squares.tolist()
    workers = range(len(by_worker))
    counted = {worker for worker in workers if state.steps is None or state.steps[worker]}
    decided = dict(zip(units, decisions, strict=False))
    lasting = {unit: verdict.lasting for unit, (verdict, _) in decided.items()}
    norm = math.sqrt(math.fsum(common))
    overlap = state.overlap.tolist()
    scale = norm * math.sqrt(overlap[1])
    return RoundReport(
        round=state.number,
        fragment=fragment,
        pseudo_gradient_norm=norm,
        unit_norms={unit: math.sqrt(square) for unit, square in zip(units, common, strict=True)},
        worker_steps=None if state.steps is None else list(state.steps),
        worker_norms=[math.sqrt(math.fsum(norms)) for norms in by_worker],
        rejected={
            unit: sorted(counted - set(verdict.accepted))
            for unit, (verdict, _) in decided.items()
            if len(verdict.accepted) < len(counted)
        },
        reasons={
            unit: [verdict.reasons[worker] for worker in sorted(verdict.reasons)]
            for unit, (verdict, _) in decided.items()
            if verdict.reasons
        },
        new_levels={unit: verdict.new_levels for unit, (verdict, _) in decided.items() if verdict.new_levels},
        lasting=list(lasting_remarks(lasting, "worker {}".format).values()),
        weights={
            unit: [dict(zip(verdict.accepted, verdict.weights, strict=True)).get(worker, 0.0) for worker in workers]
            for unit, (verdict, _) in decided.items()
        },
        clipped={unit: coefficient for unit, (_, coefficient) in decided.items() if coefficient != 1},
        cosine=overlap[0] / scale if scale > 0 else None,
        outer_options=dict(state.options),
        bytes_sent=bytes_sent,
        seconds=state.clock.seconds,
        waiting_seconds=state.clock.waiting,
        applying_seconds=state.clock.applying,
    )
