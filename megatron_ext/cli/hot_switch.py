# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch plan`: what switching between strategies would move and cost, without any GPU."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.gradient_ways import GradientWay, gradient_ways
from megatron_ext.cli.hot_switch_profile import add_profile
from megatron_ext.cli.hot_switch_suggest import add_suggest
from megatron_ext.cli.shape_options import add_shape_options, read_shape
from megatron_ext.errors import UserError
from megatron_ext.phrases import as_option

if TYPE_CHECKING:
    from megatron_ext.hot_switch import Strategy, StrategyList, SwitchFigures
    from megatron_ext.params import GptShape

__all__ = ["add_parser", "run_plan"]

_DESCRIPTION = """\
Plan the switches of a training step that goes through several parallel strategies, and print what
each would move: from home to the guest of the shortest sequences, on to the next longer ones, and back
home; then what the guests' gradients move. No GPU is needed.
"""

_EPILOG = """\
Columns: GiB moved by all ranks together, and from other nodes among these; GiB of the busiest sender
and of the busiest receiver; messages (pairs of ranks that exchange something); GiB of parameters of the
fullest rank before, after, and during the switch; and the least time that the links allow.

A guest's gradients go home or to the next guest, whichever moves fewer bytes; both are printed.

Ranks are numbered as Megatron does, tp-cp-ep-dp-pp from fast to slow.

Example:
  megatron-ext hot-switch plan --model llama-7b --gpus-per-node 8 --strategies 1,4,2 8,1,1 2,2,2
"""

_HEAD = (
    *("from", "to", "moved", "other nodes", "max sent", "max received", "messages"),
    *("before", "after", "during", "at least ms"),
)
_GIB = 2**30


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("hot-switch", help="plan hot switching", description="Hot switching's tools.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    plan = actions.add_parser(
        "plan",
        help="what switching between strategies would move and cost",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = plan.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        nargs="+",
        metavar="DP,TP,PP",
        help="home first, then the guests, shortest bucket first",
    )
    group.add_argument("--strategy-file", type=Path, metavar="FILE", help="the same as YAML, with more fields")
    group.add_argument(
        "--bucket-sizes",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="bounds of the buckets from the longest sequence to 0; checked, and shown",
    )
    group.add_argument("--seq-length", type=int, metavar="TOKENS", help="checked against the buckets")
    group.add_argument("--world-size", type=int, metavar="N", help="checked against the strategies")
    add_shape_options(plan)
    machine = plan.add_argument_group("machine")
    machine.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default %(default)s")
    machine.add_argument(
        "--intra-node-bandwidth",
        type=float,
        default=200.0,
        metavar="GB/S",
        help="of one GPU to all others of its node, each way (default %(default)g)",
    )
    machine.add_argument(
        "--inter-node-bandwidth",
        type=float,
        default=25.0,
        metavar="GB/S",
        help="of one GPU to other nodes, each way (default %(default)g)",
    )
    plan.add_argument(
        "--algorithm",
        choices=("balanced", "joint", "greedy", "round-robin", "fcfs"),
        default="balanced",
        help="who sends what several ranks hold (default %(default)s; the others are there to compare)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    plan.set_defaults(func=run_plan)
    add_suggest(actions)
    add_profile(actions)


def run_plan(options: argparse.Namespace) -> int:
    """Plan every switch and print what they cost.

    Raises:
        UserError: the model, a strategy, a bucket or the machine cannot be as it was given.
    """
    from megatron_ext.hot_switch import Links, measure_plan, plan_switch
    from megatron_ext.hot_switch.planning.plan import check_nodes

    for name in ("intra_node_bandwidth", "inter_node_bandwidth"):
        if not 1e-6 <= getattr(options, name) < math.inf:
            given = getattr(options, name)
            raise UserError(f"{as_option(name)} is {given:g}; give GB/s, a finite number from 1e-6 on")
    shape = read_shape(options)
    chosen = _strategies(options, shape)
    check_nodes(chosen.home.world_size, options.gpus_per_node)
    links = Links(within_node=options.intra_node_bandwidth * 1e9, between_nodes=options.inter_node_bandwidth * 1e9)

    def figures_of(source: Strategy, target: Strategy) -> SwitchFigures:
        return measure_plan(
            plan_switch(
                shape,
                source.layout(shape.num_layers),
                target.layout(shape.num_layers),
                gpus_per_node=options.gpus_per_node,
                algorithm=options.algorithm,
            )
        )

    figures = [figures_of(source, target) for source, target in chosen.switches]
    direct = [figures_of(guest, chosen.home) for guest in chosen.strategies[1:-1]]
    seconds = [figure.seconds(links) for figure in figures]
    gradients = gradient_ways(chosen, figures, direct, links, 4 / shape.dtype.itemsize)
    if options.json:
        print(json.dumps(_as_object(options, chosen, figures, seconds, gradients), indent=2))
    else:
        _print_report(options, shape, chosen, figures, seconds, gradients)
    return 0


def _strategies(options: argparse.Namespace, shape: GptShape) -> StrategyList:
    from megatron_ext.hot_switch import read_strategies, read_strategy_file

    if options.world_size is not None and options.world_size < 1:
        raise UserError(f"--world-size is {options.world_size}; it must be at least 1")
    known: dict[str, Any] = {"world_size": options.world_size, "seq_length": options.seq_length, "shape": shape}
    if (options.strategies is None) == (options.strategy_file is None):
        raise UserError('give either --strategies, e.g. "1,4,2" "8,1,1", or --strategy-file')
    if options.strategy_file is None:
        return read_strategies(options.strategies, options.bucket_sizes, **known)
    if options.bucket_sizes is not None:
        raise UserError("--bucket-sizes goes with --strategies; write bucket_sizes into the strategy file")
    return read_strategy_file(options.strategy_file, **known)


def _as_object(
    options: argparse.Namespace,
    chosen: StrategyList,
    figures: Sequence[SwitchFigures],
    seconds: Sequence[float],
    gradients: Sequence[GradientWay],
) -> dict[str, Any]:
    ends = [{"from": source.label, "to": target.label} for source, target in chosen.switches]
    return {
        "world_size": chosen.home.world_size,
        "gpus_per_node": options.gpus_per_node,
        "algorithm": options.algorithm,
        "switches": [
            {
                **end,
                "bytes_total": figure.bytes_total,
                "bytes_inter_node": figure.bytes_inter_node,
                "max_sent": figure.max_sent,
                "max_received": figure.max_received,
                "messages": figure.messages,
            }
            for end, figure in zip(ends, figures, strict=True)
        ],
        "gradients": [way.as_object() for way in gradients],
        "estimates": [
            {
                **end,
                "slices": figure.slices,
                "max_held_before": int(figure.held_before.max()),
                "max_held_after": int(figure.held_after.max()),
                "max_held_during": figure.max_held_during,
                "seconds": duration,
            }
            for end, figure, duration in zip(ends, figures, seconds, strict=True)
        ],
    }


def _print_report(
    options: argparse.Namespace,
    shape: GptShape,
    chosen: StrategyList,
    figures: Sequence[SwitchFigures],
    seconds: Sequence[float],
    gradients: Sequence[GradientWay],
) -> None:
    from megatron_ext.params import gpt_parameters

    count = sum(tensor.numel for tensor in gpt_parameters(shape))
    print(
        f"{count / 1e9:.2f} billion parameters, {count * 2 / _GIB:.2f} GiB in bf16, on {chosen.home.world_size} ranks, "
        f"{options.gpus_per_node} per node; senders: {options.algorithm}"
    )
    for number, bucket in enumerate(chosen.buckets):
        role = "guest" if number else "home "
        print(f"  {role} {chosen.strategies[number].label}: {bucket.above} < length <= {bucket.up_to}")
    if not figures:
        print("one strategy: there is nothing to switch")
        return
    rows = []
    for (source, target), figure, duration in zip(chosen.switches, figures, seconds, strict=True):
        sizes = (figure.bytes_total, figure.bytes_inter_node, figure.max_sent, figure.max_received)
        held = (int(figure.held_before.max()), int(figure.held_after.max()), figure.max_held_during)
        rows.append(
            (
                *(source.label, target.label),
                *(f"{size / _GIB:.2f}" for size in sizes),
                str(figure.messages),
                *(f"{size / _GIB:.2f}" for size in held),
                f"{1000 * duration:.1f}",
            )
        )
    total = sum(figure.bytes_total for figure in figures)
    between = sum(figure.bytes_inter_node for figure in figures)
    print("\nGiB of bf16 parameters per switch, in the order of a training step:")
    print(_table(_HEAD, rows))
    print(
        f"together {total / _GIB:.2f} GiB, {between / _GIB:.2f} of it between nodes; at least "
        f"{1000 * sum(seconds):.1f} ms at {options.intra_node_bandwidth:g} GB/s per GPU within nodes and "
        f"{options.inter_node_bandwidth:g} between them"
    )
    print("\nGiB of fp32 gradients per guest, to home or to the next guest, whichever moves fewer:")
    print(_table(GradientWay.HEAD, [way.as_row() for way in gradients]))


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    )
