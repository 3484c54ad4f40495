# SPDX-License-Identifier: Apache-2.0
"""How much faster hot switching should be than single strategies in the ten cases of HotSPa's paper: a table that is
computed, not measured. No GPU is needed, and none was used.

    python -m benchmarks.hot_switch_estimate [--json FILE]

Every case is what `megatron-ext simulate hot-switch` makes of it: batches, packing, the times of rows and the memory
from the functions of a run and of `hot-switch suggest`, bytes from the planner, and what GPUs and links do from their
published figures. Three baselines have a column each: the list's own home alone, the best single strategy, and the best
one that may compute layers again; one limit of memory holds for all of them and for the list. Lengths of documents are
log-normal with the mean of the published counts of tokens and documents; how wide they spread has not been published
with them, so that two spreads are tried.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import EachOnce, add_report_option, at_least, benchmark_parser, number_above
from benchmarks.common import Case, print_table, report
from megatron_ext.errors import UserError
from megatron_ext.hot_switch import PRESETS, StrategyList, read_strategies
from megatron_ext.hot_switch.cost_model.suggest import Suggester
from megatron_ext.hot_switch.data.lengths import typical_batch
from megatron_ext.params import GptShape
from megatron_ext.simulate.hot_switching.choices import Kernels
from megatron_ext.simulate.hot_switching.document_lengths import SimulatedDocuments, log_normal_lengths
from megatron_ext.simulate.hot_switching.gpu_cluster import GIB, SimulatedCluster
from megatron_ext.simulate.hot_switching.switching_setup import (
    BEST,
    BEST_RECOMPUTING,
    HOME,
    HOT,
    DoesNotFit,
    SwitchingSetup,
)

TABLE = Path(__file__).resolve().parents[1] / "configs" / "hot_switch_strategies.txt"
CONTEXT = 32768
PAPERS_BEST = 2.99
"""HotSPa reports speed-ups of up to this; of which case is not known here."""

_REACHED = 0.45
"""Part of the peak that training reaches; Megatron-LM's authors report 44 to 52 % on A100, and up to 47 % on H100."""

USABLE_GIB = 73.3
"""Of a GPU's 80 GiB, for training: what the planner of HotSPa's successor (Hydraulis) lets an A800 use, 81,252 MiB less
6 GiB to be safe."""


def _cluster(tflops: float, within: float, between: float) -> SimulatedCluster:
    return SimulatedCluster(
        tflops=_REACHED * tflops,
        memory_gib=USABLE_GIB,
        intra_node_bandwidth=within,
        inter_node_bandwidth=between,
    )


MACHINES: Mapping[str, SimulatedCluster] = {
    # Dense bf16 peak, NVLink and network, both per GPU and direction: 8 NICs of 200 and 400 Gbit/s a node.
    "A800": _cluster(312, 200, 25),
    "H100": _cluster(989, 450, 50),
}

BASELINES = {"home": HOME, "static": BEST, "static_recomputing": BEST_RECOMPUTING}
"""By a word for a case's name."""

# Tokens by documents: RefinedWeb's public part has 600 G in 968 M pages, StarCoder's data 250 G in 206.6 M files.
MEAN_TOKENS = {"commoncrawl": 600 / 0.968, "github": 250 / 0.2066}
COMBINATIONS = {"commoncrawl": "c1", "github": "c2"}
"""The lists that HotSPa's README names for a data set."""


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """One experiment of the paper at its longest context."""

    dataset: str
    """Key of `MEAN_TOKENS`."""

    model: str
    """Without `llama-`."""

    gpus: int
    """Of the job."""

    bounds: tuple[int, ...]
    """Bucket sizes, down to 0."""

    strategies: tuple[str, ...]
    """Home first."""

    @property
    def name(self) -> str:
        """As in the names of the scripts in examples/hot_switch/exprs_for_paper."""
        return f"{self.dataset}_{self.model}_{self.gpus}gpus"

    @property
    def shape(self) -> GptShape:
        """The model."""
        return PRESETS[f"llama-{self.model}"]


def paper_cases() -> list[PaperCase]:
    """Return the ten cases, with the strategies that the launch scripts use."""
    rows = [line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return [
        PaperCase(
            dataset=dataset,
            model=model,
            gpus=int(gpus),
            bounds=tuple(map(int, bounds.split(","))),
            strategies=tuple(strategies),
        )
        for dataset, combination in COMBINATIONS.items()
        for found, model, gpus, context, bounds, *strategies in rows
        if found == combination and int(context) == CONTEXT and model != "3b"
    ]


def setup_of(
    case: PaperCase, cluster: SimulatedCluster, kernels: Kernels, spread: float, options: argparse.Namespace
) -> SwitchingSetup:
    """Return a case as something to simulate.

    Args:
        case: with its list.
        cluster: the GPUs.
        kernels: of attention.
        spread: standard deviation of the logarithm of the lengths.
        options: the batches.
    """
    return SwitchingSetup(
        shape=case.shape,
        strategies=read_strategies(case.strategies, case.bounds, world_size=case.gpus, shape=case.shape),
        cluster=cluster,
        data=SimulatedDocuments(
            steps=options.steps,
            global_batch_size=options.sequences,
            mean_length=MEAN_TOKENS[case.dataset],
            length_spread=spread,
        ),
        kernels=kernels,
    )


def suggested(setup: SwitchingSetup) -> StrategyList:
    """Return the list that `hot-switch suggest` finds for a case.

    Raises:
        DoesNotFit: no single strategy fits without computing anything again, where `suggest` ends.
    """
    documents = log_normal_lengths(setup.data.mean_length, setup.data.length_spread)
    lengths = typical_batch(documents, sequences=setup.data.global_batch_size, context=CONTEXT)
    suggester = Suggester(setup.times(), gpus=setup.strategies.home.world_size, lengths=lengths, context=CONTEXT)
    try:
        return suggester.best([CONTEXT >> halved for halved in range(1, 5)]).strategies
    except UserError as error:
        raise DoesNotFit(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate all cases and report."""
    options = parser().parse_args(arguments)
    print(
        "COMPUTED from published figures of GPUs and links, not measured: steps with "
        f"{options.sequences} sequences of up to {CONTEXT} tokens in {options.memory_gib:g} GiB of every GPU.\n"
    )
    head = ["case", "GPUs", "attention", "spread", "list", "hot s", "GiB", "switching s"]
    head += [word for title in BASELINES.values() for word in (title, "speed-up")]
    cases, rows = [], []
    chosen = [case for case in paper_cases() if options.cases is None or case.name in options.cases]
    for case, name, kernels, spread in product(chosen, options.machines, options.attention, options.spreads):
        cluster = replace(MACHINES[name], memory_gib=options.memory_gib)
        setup = setup_of(case, cluster, kernels, spread, options)
        row = [case.name, name, kernels, f"{spread:g}"]
        try:
            setup.check()
            if options.suggest:
                setup = replace(setup, strategies=suggested(setup))
            runs = setup.runs()
        except DoesNotFit as error:
            print(f"{case.name}: {error}")
            rows.append([*row, "does not fit", *["-"] * (len(head) - len(row) - 1)])
            continue
        except UserError as error:
            print(f"benchmarks.hot_switch_estimate: error: {error}", file=sys.stderr)
            return 2
        hot = runs[HOT]
        row += [hot.strategies, f"{hot.seconds / options.steps:.2f}", f"{hot.memory / GIB:.0f}"]
        row += [f"{hot.time['switching'] / options.steps:.2f}"]
        for word, title in BASELINES.items():
            if (run := runs.get(title)) is None:
                row += ["does not fit", "-"]
                continue
            gain = run.seconds / hot.seconds
            row += [run.strategies, f"{gain:.2f}"]
            key = f"{name.lower()}_{case.name}_{kernels}_spread_{spread:g}_over_{word}"
            key += "_suggested" * options.suggest
            cases.append(Case(case=key, value=gain, unit="computed speed-up", goal=None, direction="higher"))
        rows.append(row)
    print_table(head, rows)
    print(f"\nSpeed-ups are computed, over what stands before them; the paper reports up to {PAPERS_BEST}.")
    report(cases, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = benchmark_parser("hot_switch_estimate", __doc__)
    names = [case.name for case in paper_cases()]
    result.add_argument(
        "--cases", nargs="+", action=EachOnce, choices=names, metavar="CASE", help="e.g. github_7b_8gpus (all ten)"
    )
    result.add_argument(
        "--machines", nargs="+", action=EachOnce, choices=tuple(MACHINES), default=list(MACHINES), help="both"
    )
    result.add_argument(
        "--attention",
        nargs="+",
        action=EachOnce,
        choices=get_args(Kernels),
        default=get_args(Kernels),
        help="kernels, as of `simulate hot-switch`; fused-rows are the paper's (all three)",
    )
    result.add_argument(
        "--spreads",
        nargs="+",
        type=number_above(0, 2, or_equal=True),
        action=EachOnce,
        default=[1.2, 1.6],
        metavar="S",
        help="of the log of the lengths (1.2 1.6)",
    )
    result.add_argument("--suggest", action="store_true", help="with lists that `suggest` finds; takes minutes")
    result.add_argument("--sequences", type=at_least(1, 100_000), default=512, help="of a step (512)")
    result.add_argument("--steps", type=at_least(1, 100_000), default=10, help="that are simulated (10)")
    result.add_argument(
        "--memory-gib", type=number_above(0, 1e6), default=USABLE_GIB, help=f"of a GPU ({USABLE_GIB:g})"
    )
    add_report_option(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
