# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate hot-switch`: steps with several strategies, beside single strategies that fit as well."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.cli.shape_options import add_shape_options, add_topk_option, read_shape, topk_problems
from megatron_ext.cli.simulation.simulated_flags import ProductFlags
from megatron_ext.cli.simulation.simulation_output import add_output_options
from megatron_ext.errors import UserError, combine
from megatron_ext.phrases import plural

if TYPE_CHECKING:
    from megatron_ext.simulate.hot_switching.switching_run import SwitchingRun

__all__ = ["add_hot_switch"]

_DESCRIPTION = """\
Simulate steps with hot switching, and with single strategies under the same limit of memory: the list's own home, the
quickest one, and the quickest one that may compute layers again in the backward pass. Batches, packing, the times of
rows and switches and the memory come from the functions of a run and of `hot-switch suggest`; docs/simulate.md says
what is modelled and what is not.
"""

_SIMULATED = frozenset(
    (
        *("hot_switch_strategies", "hot_switch_bucket_sizes", "hot_switch_strategy_file"),
        *("hot_switch_gpus_per_node", "hot_switch_attention"),
    )
)

_REASONS = {
    "hot_switch_algorithm": "is balanced in a simulation; drop it, and compare the others with `hot-switch plan`",
}


def _flags() -> ProductFlags:
    from megatron_ext.hot_switch.config import HotSwitchConfig

    return ProductFlags((HotSwitchConfig,), _SIMULATED, _REASONS)


def add_hot_switch(actions: Any) -> None:
    """Add the kind to the simulate subcommand."""
    from megatron_ext.simulate.hot_switching.choices import Kernels, Recomputing
    from megatron_ext.simulate.hot_switching.document_lengths import SimulatedDocuments
    from megatron_ext.simulate.hot_switching.gpu_cluster import SimulatedCluster

    parser = actions.add_parser(
        "hot-switch",
        help="one job that switches between strategies",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("hot switching, as for a run")
    group.add_argument(
        "--hot-switch-strategies",
        nargs="+",
        metavar="DP,TP,PP",
        help="home first, then the guests, shortest bucket first",
    )
    group.add_argument(
        "--hot-switch-bucket-sizes", nargs="+", type=int, metavar="TOKENS", help="from the longest sequence down to 0"
    )
    group.add_argument("--hot-switch-strategy-file", type=Path, metavar="FILE", help="the same as YAML")
    group.add_argument("--hot-switch-gpus-per-node", type=int, default=8, metavar="N", help="default %(default)s")
    group.add_argument(
        "--hot-switch-attention",
        choices=get_args(Kernels),
        default="documents",
        help="documents: a fused kernel over each document of a packed row (default); rows: Megatron's unfused one "
        "over whole rows; fused-rows: a fused kernel over whole rows, as in HotSPa's artifact, which no run has",
    )
    group.add_argument(
        "--recompute",
        choices=get_args(Recomputing),
        default="needed",
        help="what the list's strategies and its home alone compute again in the backward pass: no more than each of "
        "them needs to fit (default), nothing, attention's scores, or whole layers",
    )
    _flags().add_refused(parser)
    add_fields(parser.add_argument_group("GPUs"), SimulatedCluster)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--lengths",
        type=Path,
        metavar="PATH",
        help="prefix of a .bin/.idx corpus, or a text file with the tokens of a document per line",
    )
    add_fields(data, SimulatedDocuments)
    add_shape_options(parser)
    add_topk_option(parser)
    listed = ("--hot-switch-strategies", "--hot-switch-strategy-file")
    add_output_options(parser, _simulate, (listed, ("--lengths", "--mean-length"), ("--model", "--num-layers")))


def _simulate(options: argparse.Namespace) -> tuple[str, Mapping[str, SwitchingRun]]:
    from megatron_ext.hot_switch import read_strategies, read_strategy_file
    from megatron_ext.hot_switch.data.lengths import read_lengths
    from megatron_ext.simulate.hot_switching.document_lengths import SimulatedDocuments
    from megatron_ext.simulate.hot_switching.gpu_cluster import SimulatedCluster
    from megatron_ext.simulate.hot_switching.switching_setup import HOT, SwitchingSetup

    refused = _flags().problems(options)
    data, measured = from_options(SimulatedDocuments, options), options.lengths is not None
    # Before files are read.
    refused += data.problems(measured=measured)
    shape = read_shape(options)
    if refused or (refused := topk_problems(options.moe_router_topk, shape)):
        raise combine(refused, "simulate")
    strategies, file = options.hot_switch_strategies, options.hot_switch_strategy_file
    if strategies is not None and file is not None:
        raise UserError("simulate: --hot-switch-strategies and --hot-switch-strategy-file are both given; drop one")
    if file is not None and options.hot_switch_bucket_sizes is not None:
        raise UserError("simulate: --hot-switch-bucket-sizes goes with --hot-switch-strategies; drop it")
    if file is None:
        listed = read_strategies(strategies, options.hot_switch_bucket_sizes, shape=shape)
    else:
        listed = read_strategy_file(file, shape=shape)
    setup = SwitchingSetup(
        shape=shape,
        strategies=listed,
        cluster=from_options(SimulatedCluster, options),
        data=data,
        documents=None if options.lengths is None else read_lengths(options.lengths),
        gpus_per_node=options.hot_switch_gpus_per_node,
        kernels=options.hot_switch_attention,
        recompute=options.recompute,
        active_experts=options.moe_router_topk,
    )
    setup.check()
    runs = setup.runs()
    whose = options.lengths or f"assumed: log-normal, {data.mean_length:g} in the mean"
    context, cut = listed.buckets[0].up_to, setup.beyond_context
    beyond = f"; {cut:.2%} of the documents are longer than the context of {context} and become several sequences"
    return (
        f"{plural(listed.home.world_size, 'GPU')} with {setup.cluster.memory_gib:g} GiB, "
        f"{plural(setup.data.steps, 'step')} of {plural(setup.data.global_batch_size, 'sequence')}, lengths {whose}"
        f"{beyond if cut else ''}\n"
        f"times are modelled, not measured: hot switching is {_gains(HOT, runs)}",
        runs,
    )


def _gains(hot: str, runs: Mapping[str, SwitchingRun]) -> str:
    from megatron_ext.simulate.hot_switching.switching_setup import BEST, BEST_RECOMPUTING, HOME

    return ", ".join(
        f"{runs[name].seconds / runs[hot].seconds:.2f} times as fast as {name}"
        if name in runs
        else f"beside no {name} (none fits)"
        for name in (HOME, BEST, BEST_RECOMPUTING)
    )
