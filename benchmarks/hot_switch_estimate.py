# SPDX-License-Identifier: Apache-2.0
"""How much faster hot switching should be than the best single strategy in the ten cases of HotSPa's paper: a table
that is computed, not measured. No GPU is needed, and none was used.

    python -m benchmarks.hot_switch_estimate [--json FILE]

Step times come from the model behind `megatron-ext hot-switch suggest`, bytes from the planner, and what GPUs and links
do from their published figures. Lengths of documents are log-normal with the mean of the published counts of tokens and
documents; how wide they spread has not been published with them, so that two spreads are tried.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.common import Case, add_report_option, at_least, print_table, report
from megatron_ext.hot_switch import PRESETS, Links, read_strategies
from megatron_ext.hot_switch.cost_model.step_time import Machine, ModelledTimes, StepTimes
from megatron_ext.hot_switch.cost_model.suggest import Suggester, Suggestion
from megatron_ext.hot_switch.data.lengths import typical_batch
from megatron_ext.params import GptShape

Attention = Literal["rows", "documents"]
TABLE = Path(__file__).resolve().parents[1] / "configs" / "hot_switch_strategies.txt"
CONTEXT = 32768
PAPERS_BEST = 2.99
"""HotSPa reports speed-ups of up to this; of which case is not known here."""

_REACHED = 0.45
"""Part of the peak that training reaches; Megatron-LM's authors report 44 to 52 % on A100, and up to 47 % on H100."""

_USABLE = 0.875
"""Part of a GPU's memory that training may use: 70 of 80 GiB."""


def _machine(tflops: float, gib: float, within: float, between: float) -> Machine:
    return Machine(
        operations=_REACHED * tflops * 1e12,
        memory=_USABLE * gib * 2**30,
        links=Links(within_node=within * 1e9, between_nodes=between * 1e9),
    )


MACHINES: Mapping[str, Machine] = {
    # Dense bf16 peak, memory, NVLink and network, both per GPU and direction: 8 NICs of 200 and 400 Gbit/s a node.
    "A800": _machine(312, 80, 200, 25),
    "H100": _machine(989, 80, 450, 50),
}

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


def batch_of(dataset: str, spread: float, sequences: int) -> Sequence[int]:
    """Return the lengths of a typical batch.

    Args:
        dataset: key of `MEAN_TOKENS`.
        spread: standard deviation of the logarithm of the length.
        sequences: of the batch.
    """
    median = MEAN_TOKENS[dataset] / math.exp(spread**2 / 2)
    places = (np.arange(100_000) + 0.5) / 100_000
    normal = NormalDist()
    documents = [round(median * math.exp(spread * normal.inv_cdf(place))) for place in places.tolist()]
    return typical_batch(np.array(documents, dtype=np.int64), sequences=sequences, context=CONTEXT)


def suggester_of(case: PaperCase, machine: Machine, lengths: Sequence[int], attention: Attention) -> Suggester:
    """Return what compares strategies for a case."""
    times = StepTimes(times=ModelledTimes(shape=case.shape, machine=machine), attention=attention)
    return Suggester(times, gpus=case.gpus, lengths=lengths, context=CONTEXT)


def with_the_papers_list(case: PaperCase, suggester: Suggester) -> Suggestion:
    """Return what a step with the paper's strategies should take."""
    listed = read_strategies(case.strategies, case.bounds, world_size=case.gpus, shape=case.shape)
    strategies = [replace(strategy, sequence_parallel=strategy.tp > 1) for strategy in listed.strategies]
    return suggester.estimate(strategies, case.bounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate all cases and report."""
    options = parser().parse_args(arguments)
    print(
        "COMPUTED from published figures of GPUs and links, not measured: seconds of a step with "
        f"{options.sequences} sequences of up to {CONTEXT} tokens.\n"
    )
    head = ["case", "GPUs", "attention", "spread", "longest", "best static"]
    head += ["static s", "hot s", "switching s", "hot GiB", "speed-up"]
    cases, rows = [], []
    chosen = [case for case in paper_cases() if options.cases is None or case.name in options.cases]
    for case, name, attention, spread in product(chosen, options.machines, options.attention, options.spreads):
        lengths = batch_of(case.dataset, spread, options.sequences)
        suggester = suggester_of(case, MACHINES[name], lengths, attention)
        static, hot = suggester.static()[0], with_the_papers_list(case, suggester)
        gain = static.seconds / hot.seconds
        row = [case.name, name, attention, f"{spread:g}", str(max(lengths)), static.strategies.home.label]
        row += [f"{seconds:.2f}" for seconds in (static.seconds, hot.seconds, hot.switching)]
        row += [f"{max(hot.memory) / 2**30:.0f}", f"{gain:.2f}"]
        key = f"{name.lower()}_{case.name}_{attention}_spread_{spread:g}"
        cases.append(_case(key, gain))
        if options.suggest:
            best = suggester.best([CONTEXT >> halved for halved in range(1, 5)])
            labels = " ".join(strategy.label for strategy in best.strategies.strategies)
            row += [f"{static.seconds / best.seconds:.2f}", labels]
            cases.append(_case(f"{key}_suggested", static.seconds / best.seconds))
        rows.append(row)
    print_table(head + (["suggested", "strategies"] if options.suggest else []), rows)
    print(f"\nSpeed-ups are those over the best static strategy, computed; the paper reports up to {PAPERS_BEST}.")
    report(cases, options.json)
    return 0


def _case(key: str, gain: float) -> Case:
    return Case(case=key, value=gain, unit="computed speed-up", goal=None, direction="higher")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in paper_cases()]
    result.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="e.g. github_7b_8gpus (all ten)")
    result.add_argument("--machines", nargs="+", choices=tuple(MACHINES), default=list(MACHINES), help="both")
    result.add_argument(
        "--attention", nargs="+", choices=get_args(Attention), default=["rows", "documents"], help="over what (both)"
    )
    result.add_argument(
        "--spreads", nargs="+", type=float, default=[1.2, 1.6], metavar="S", help="of the log of the lengths (1.2 1.6)"
    )
    result.add_argument("--suggest", action="store_true", help="also with the list that `suggest` finds; takes minutes")
    result.add_argument("--sequences", type=at_least(1), default=512, help="of a step (512)")
    add_report_option(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
