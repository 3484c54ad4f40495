# SPDX-License-Identifier: Apache-2.0
"""What SPES costs as a method, and whether this implementation adds to it.

    python -m benchmarks.spes_method peers      # real peers at a real server against replicas in one process
    python -m benchmarks.spes_method price      # what rounds and owners cost, each at its best learning rate
    python -m benchmarks.spes_method released   # every peer with the batch of the centralized job, as it was released

The replicas are plain PyTorch: a small GPT with a mixture of experts, masks in place of frozen experts, means in place
of a server. All studies train on the source code of Python's standard library. A run of `price` and `released` that is
finished is not made again, unless the code that trains has changed. docs/spes.md tells what came out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch

from benchmarks.command_line import (
    MOST_SEED,
    EachOnce,
    add_report_option,
    at_least,
    benchmark_parser,
    folder_for_output,
    picture,
)
from benchmarks.common import report
from benchmarks.spes_method.peers_study import study_peers
from benchmarks.spes_method.price_study import CHOOSING, RATES, study_price
from benchmarks.spes_method.released_study import study_released
from benchmarks.stdlib_corpus import tokenize_stdlib
from tests.support.distributed import REPOSITORY

__all__ = ["main", "parser"]

_SEEDS = {"peers": [1], "price": [4, 5, 6], "released": [2, 3, 4]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a study and report on it."""
    options = parser().parse_args(arguments)
    seeds = options.seeds or _SEEDS[options.study]
    if options.study == "peers" and len(seeds) != 1:
        parser().error("--seeds: peers trains with one")
    for option, value in (("--rates", options.rates), ("--choosing-seeds", options.choosing_seeds)):
        if value is not None and options.study != "price":
            parser().error(f"{option} has no effect on {options.study}; drop it")
    choosing = options.choosing_seeds or CHOOSING
    if options.study == "price" and (both := {*choosing} & {*seeds}):
        parser().error(f"--seeds: {min(both)} chooses between learning rates; measure with others (--choosing-seeds)")
    # The replicas' tensors are small: more threads wait for each other.
    torch.set_num_threads(1)
    output = options.output.resolve()
    corpus = output / "corpus" / "stdlib"
    tokenize_stdlib(corpus)
    png = options.plot or output / f"{options.study}.png"
    if options.study == "peers":
        cases = study_peers(corpus, seeds[0], png)
    elif options.study == "price":
        cases = study_price(output, corpus, seeds, png, rates=options.rates or RATES, choosing=choosing)
    else:
        cases = study_released(output, corpus, seeds, png)
    report(cases, options.json)
    print(f"the picture is {png}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    found = benchmark_parser("spes_method", __doc__)
    found.add_argument("study", choices=list(_SEEDS), help="which one")
    found.add_argument(
        "--seeds",
        type=at_least(0, MOST_SEED),
        nargs="+",
        action=EachOnce,
        help="of the weights and the samples (peers: 1, price: 4 to 6, released: 2 to 4)",
    )
    found.add_argument(
        "--choosing-seeds",
        type=at_least(0, MOST_SEED),
        nargs="+",
        action=EachOnce,
        help=f"price: those that choose between learning rates ({' '.join(map(str, CHOOSING))})",
    )
    found.add_argument(
        "--rates",
        type=_rate,
        nargs="+",
        action=EachOnce,
        help=f"price: learning rates to try ({' '.join(f'{rate:g}' for rate in RATES)})",
    )
    found.add_argument(
        "--output",
        type=folder_for_output,
        default=REPOSITORY / "outputs" / "spes" / "method",
        help="folder for corpus, runs, tables and pictures (outputs/spes/method)",
    )
    found.add_argument("--plot", type=picture, metavar="FILE", help="the picture, a PNG (STUDY.png in that folder)")
    add_report_option(found)
    return found


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: a learning rate is a number between 0 and 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
