# SPDX-License-Identifier: Apache-2.0
"""Switches between strategies on 4 processes, against a bare exchange of the same bytes between the same ranks,
against megatron-core's resharding on its own plan, and against the way round by a checkpoint; a switch that moves
nothing; and what switches of a training step send beside parameters and gradients.

    python benchmarks/switch.py [--json FILE]

The bare exchange has one message per pair of ranks, from one flat buffer into another one, and is prepared beforehand.
What a switch could take at least is that and a copy of what stays on its rank, in tensors of another shape.
Checkpoints are saved and loaded by the processes that switch, or loaded by new ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import add_report_option, at_least, benchmark_parser, require_memory
from benchmarks.common import Case, bootstrap_interval, print_table, report
from benchmarks.ranks.switching import RANKS, SWITCHES, Setting, rank_seconds
from benchmarks.switch_bytes import bytes_beside_the_plans
from benchmarks.switch_checkpoint import rank_seconds as checkpoint_seconds
from benchmarks.switch_checkpoint import restart_seconds
from megatron_ext.errors import UserError
from tests.support.distributed import run_ranks

GOAL_OVER_BARE, GOAL_NO_MOVE_MS = 1.2, 1.0
BY_CHECKPOINT = "tp_to_dp"  # the switch that moves most
GOAL_OVER_SAVE_LOAD, GOAL_OVER_RESTART = 0.2, 0.025
# megatron-core's senders are balanced in one of the switches, and one of them sends twice as much in the other.
OVER_MCORE = {"dp_to_tp": ("over_mcore_unbalanced", 0.67), "tp_to_dp": ("over_mcore_balanced", 1.0)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all switches and report."""
    options = parser().parse_args(arguments)
    setting = setting_of(options)
    # Every rank makes the whole model in fp32, to take its part of it, and holds both sides' parts.
    require_memory(parser(), "--layers, --hidden, --vocab", RANKS * 8 * numel(setting))
    try:
        require_fit(setting)
    except UserError as error:
        parser().error(f"--layers, --hidden, --vocab: {error}")
    print(f"{numel(setting) / 1e6:.1f} M parameters in bf16, {RANKS} processes, {options.pairs} pairs\n")
    cases: list[Case] = []
    rows: list[tuple[str, ...]] = []
    for name, (source, target) in SWITCHES.items():
        sides, largest = _measure(name, setting)
        switch = f"{_text(source)} > {_text(target)}", f"{largest / 2**20:.1f}"
        if name == "no_move":
            value = statistics.median(sides["switch"]) * 1e3
            cases.append(Case(case="no_move_ms", value=value, unit="ms", goal=GOAL_NO_MOVE_MS, direction="lower"))
            rows.append((*switch, f"{value:.2f}", "-", "-", "-", "-"))
            continue
        for other, (case, goal) in {"bare": (f"{name}_over_bare", GOAL_OVER_BARE), "mcore": OVER_MCORE[name]}.items():
            ratios = [ours / theirs for ours, theirs in zip(sides["switch"], sides[other], strict=True)]
            ratio, (low, high) = statistics.median(ratios), bootstrap_interval(ratios)
            cases.append(Case(case=case, value=ratio, unit="ratio", goal=goal, direction="lower"))
            times = (f"{statistics.median(sides[side]) * 1e3:.2f}" for side in ("switch", other))
            rows.append((*switch, *times, other, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"))
        least = [sum(pair) for pair in zip(sides["bare"], sides["copies"], strict=True)]
        over = statistics.median(ours / bound for ours, bound in zip(sides["switch"], least, strict=True))
        case = f"{name}_over_least"
        cases.append(Case(case=case, value=over, unit="ratio", goal=GOAL_OVER_BARE, direction="lower"))
        times = (f"{1e3 * statistics.median(seconds):.2f}" for seconds in (sides["switch"], least))
        rows.append((*switch, *times, "least", f"{over:.3f}", "-"))
    cases += _over_checkpoint(setting, options, rows)
    cases.append(
        Case(case="optimizer_bytes_moved", value=bytes_beside_the_plans(), unit="bytes", goal=0, direction="lower")
    )
    print_table(("switch", "received MiB", "switch ms", "other ms", "other", "ratio", "95 % interval"), rows)
    report(cases, options.json)
    return 0


def _over_checkpoint(setting: Setting, options: argparse.Namespace, rows: list[tuple[str, ...]]) -> list[Case]:
    """Compare with checkpoints, and add to the table's rows."""
    source, target = SWITCHES[BY_CHECKPOINT]
    few = replace(setting, pairs=options.checkpoint_pairs, warmup=1)
    with tempfile.TemporaryDirectory(prefix="switch-") as folder:
        by_rank = run_ranks(checkpoint_seconds, RANKS, (source, target), few, folder, timeout=900)
        restarts = [restart_seconds(Path(folder) / "0", target, setting, ranks=RANKS) for _ in range(options.restarts)]
    sides = slowest(by_rank)
    switch = statistics.median(sides["switch"])
    ratios = [ours / theirs for ours, theirs in zip(sides["switch"], sides["save_load"], strict=True)]
    low, high = bootstrap_interval(ratios)
    found = [
        (
            *("save_load", statistics.median(sides["save_load"]), GOAL_OVER_SAVE_LOAD),
            *(statistics.median(ratios), f"{low:.3f} - {high:.3f}"),
        )
    ]
    if restarts:
        restart = statistics.median(restarts)
        found.append(("restart", restart, GOAL_OVER_RESTART, switch / restart, "-"))
    cases = []
    for other, seconds, goal, ratio, interval in found:
        cases.append(Case(case=f"over_{other}", value=ratio, unit="ratio", goal=goal, direction="lower"))
        times = f"{switch * 1e3:.2f}", f"{seconds * 1e3:.2f}"
        rows.append((f"{_text(source)} > {_text(target)}", "-", *times, other, f"{ratio:.4f}", interval))
    return cases


def setting_of(options: argparse.Namespace) -> Setting:
    """Return what the options ask for."""
    return Setting(
        layers=options.layers,
        hidden=options.hidden,
        vocab=options.vocab,
        pairs=options.pairs,
        warmup=options.warmup,
        direct_bytes=options.direct_bytes,
        chunk_bytes=options.chunk_bytes,
    )


def numel(setting: Setting) -> int:
    """Return the number of parameters."""
    from megatron_ext.params import gpt_parameters

    return sum(tensor.numel for tensor in gpt_parameters(setting.shape()))


def require_fit(setting: Setting) -> None:
    """Check, before processes are started, that every layout can hold the model.

    Raises:
        UserError: one cannot.
    """
    from megatron_ext.hot_switch import plan_switch
    from megatron_ext.params import Layout

    for switch in SWITCHES.values():
        plan_switch(setting.shape(), *(Layout(dp=dp, tp=tp, pp=pp) for dp, tp, pp in switch))


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the seconds of the rank that took longest, of each side and pair by pair."""
    return {
        side: [max(pair) for pair in zip(*(seconds[side] for seconds in by_rank), strict=True)] for side in by_rank[0]
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("switch", __doc__)
    found.add_argument("--pairs", type=at_least(1), default=15, help="measured pairs (15)")
    found.add_argument("--warmup", type=at_least(0), default=3, help="pairs before those, not counted (3)")
    found.add_argument("--checkpoint-pairs", type=at_least(1), default=5, help="pairs with a checkpoint (5)")
    found.add_argument("--restarts", type=at_least(0), default=2, help="restarts from a checkpoint (2; 0: none)")
    found.add_argument("--layers", type=at_least(2, 1000), default=12, help="layers of the model, even (12)")
    found.add_argument("--hidden", type=at_least(16), default=512, help="hidden size (512)")
    found.add_argument("--vocab", type=at_least(16), default=32768, help="vocabulary (32768)")
    found.add_argument("--direct-bytes", type=at_least(0, 1 << 40), help="instead of the executor's default")
    found.add_argument("--chunk-bytes", type=at_least(8, 1 << 40), help="instead of the executor's default")
    add_report_option(found)
    return found


def _measure(name: str, setting: Setting) -> tuple[dict[str, list[float]], int]:
    """Return each side's seconds of the slowest rank, pair by pair, and the largest receiver's bytes."""
    by_rank = run_ranks(rank_seconds, RANKS, name, setting, timeout=900)
    return slowest([seconds for seconds, _ in by_rank]), max(received for _, received in by_rank)


def _text(strategy: tuple[int, int, int]) -> str:
    return ",".join(map(str, strategy))


if __name__ == "__main__":
    sys.exit(main())
