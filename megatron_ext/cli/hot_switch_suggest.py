# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch suggest`: buckets and strategies for a corpus, a model and a machine, without any GPU."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.shape_options import add_shape_options, add_topk_option, read_shape, topk_problems
from megatron_ext.errors import UserError, combine
from megatron_ext.phrases import as_option

if TYPE_CHECKING:
    from megatron_ext.hot_switch.cost_model.step_time import Coefficients
    from megatron_ext.hot_switch.cost_model.suggestion import Suggestion

__all__ = ["add_suggest", "run_suggest"]

_DESCRIPTION = """\
Propose buckets of sequence lengths and a strategy for each, given the lengths of the data, the model
and the machine. Every way to cut the lengths at the bounds is tried, with the quickest strategies that
fit. No GPU is needed; times are modelled, so they are estimates, unless --times gives measured ones: then
strategies with another (TP, PP) than those are not proposed.
"""

_EPILOG = """\
--times FILE is JSON: {"tp,pp": [a, b, c], ...}, seconds of a row on a pipeline stage, forward and
backward, being a (s_1^2 + s_2^2 + ...) + b (s_1 + s_2 + ...) + c for sequences of s_1, s_2, ... tokens.

Example:
  megatron-ext hot-switch suggest --model llama-7b --gpus 8 --lengths corpus --context 32768
"""

_GIB = 2**30

_MOST_GPUS = 16384
"""Of a job: planning one switch of that many ranks already takes seconds."""


def add_suggest(actions: Any) -> None:
    """Add the action to the hot-switch subcommand."""
    parser = actions.add_parser(
        "suggest",
        help="propose buckets and strategies",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="PATH",
        help="prefix of a .bin/.idx corpus, or a text file with the tokens of a document per line",
    )
    data.add_argument("--context", type=int, required=True, metavar="TOKENS", help="longest sequence")
    data.add_argument("--global-batch-size", type=int, default=512, metavar="N", help="sequences (default 512)")
    data.add_argument(
        "--bounds",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="where lengths may be cut (default: the context halved, up to four times)",
    )
    add_shape_options(parser)
    add_topk_option(parser)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the job")
    machine.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default %(default)s")
    for name, default, unit, text in (
        ("--memory-gib", 70.0, "GIB", "of a GPU that training may use"),
        ("--tflops", 140.0, "N", "10^12 operations per second that a GPU reaches in training, not its data sheet's"),
        ("--intra-node-bandwidth", 200.0, "GB/S", "of one GPU to all others of its node, each way"),
        ("--inter-node-bandwidth", 25.0, "GB/S", "of one GPU to other nodes, each way"),
    ):
        machine.add_argument(name, type=float, default=default, metavar=unit, help=f"{text} (default %(default)g)")
    machine.add_argument(
        "--attention",
        choices=("documents", "rows"),
        default="documents",
        help="over what a GPU computes it, as --hot-switch-attention says: each document of a packed row alone "
        "(default), or the whole row",
    )
    machine.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="none",
        help="what every strategy computes again in the backward pass: nothing (default), attention's scores, or whole "
        "layers; it saves memory and takes time",
    )
    machine.add_argument(
        "--margin",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="error of the times: switching that is predicted to gain less is not suggested (default %(default)g)",
    )
    machine.add_argument("--times", type=Path, metavar="FILE", help="measured times, see below; without recomputation")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.set_defaults(func=run_suggest)


def run_suggest(options: argparse.Namespace) -> int:
    """Compare all lists and print the best one.

    Raises:
        UserError: an option cannot be as it was given, or nothing fits.
    """
    from megatron_ext.hot_switch import Links
    from megatron_ext.hot_switch.cost_model.step_time import Machine, ModelledTimes, StepTimes
    from megatron_ext.hot_switch.cost_model.suggest import Suggester
    from megatron_ext.hot_switch.data.lengths import read_lengths, typical_batch

    _check(options)
    machine = Machine(
        operations=options.tflops * 1e12,
        memory=options.memory_gib * _GIB,
        gpus_per_node=options.gpus_per_node,
        links=Links(within_node=options.intra_node_bandwidth * 1e9, between_nodes=options.inter_node_bandwidth * 1e9),
    )
    shape = read_shape(options)
    if problems := topk_problems(options.moe_router_topk, shape):
        raise combine(problems, "hot-switch suggest")
    times = ModelledTimes(
        shape=shape,
        machine=machine,
        measured={} if options.times is None else _read_times(options.times),
        # Megatron's attention over rows is unfused.
        unfused_attention=options.attention == "rows",
        active_experts=options.moe_router_topk,
        recompute=options.recompute,
    )
    documents = read_lengths(options.lengths)
    lengths = typical_batch(documents, sequences=options.global_batch_size, context=options.context)
    suggester = Suggester(
        StepTimes(times=times, attention=options.attention),
        gpus=options.gpus,
        lengths=lengths,
        context=options.context,
    )
    bounds = options.bounds or [options.context >> halved for halved in range(1, 5)]
    static, best = suggester.static(), suggester.best(bounds)
    # A document has one position fewer than tokens: the last one predicts nothing.
    cut = int((documents > options.context + 1).sum())
    if options.json:
        content = {
            "static": [_as_object(one) for one in static],
            "suggestion": _as_object(best),
            "predicted_speedup": static[0].seconds / best.seconds,
            "worth_switching": _is_worth_it(options, static, best),
            "documents": len(documents),
            "documents_beyond_context": cut,
        }
        print(json.dumps(content, indent=2))
        return 0
    if cut:
        print(
            f"{cut} of {len(documents)} documents are longer than --context {options.context}, the longest has "
            f"{documents.max()} tokens: each becomes several sequences\n"
        )
    _print_report(options, static, best, measured=len(times.measured), unused=suggester.unused)
    return 0


def _is_worth_it(options: argparse.Namespace, static: list[Suggestion], best: Suggestion) -> bool:
    """Return whether a list is predicted to gain more than the times may be wrong."""
    return bool(static[0].seconds / best.seconds > 1 + options.margin)


def _check(options: argparse.Namespace) -> None:
    for name in (
        "context",
        "global_batch_size",
        "gpus",
        "gpus_per_node",
        "memory_gib",
        "tflops",
        "intra_node_bandwidth",
        "inter_node_bandwidth",
    ):
        if not 1e-6 <= getattr(options, name) < math.inf:
            given = getattr(options, name)
            raise UserError(f"{as_option(name)} is {given:g}; it must be a finite number above 0")
    if not 0 <= options.margin < math.inf:
        raise UserError(f"--margin is {options.margin:g}; it must be a finite number, 0 or above")
    if options.gpus > _MOST_GPUS:
        raise UserError(f"--gpus is {options.gpus}; lists are compared for up to {_MOST_GPUS}")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        raise UserError(f"--gpus {options.gpus} do not fill nodes of --gpus-per-node {options.gpus_per_node}")
    for bound in options.bounds or []:
        if not 0 < bound < options.context:
            raise UserError(f"--bounds has {bound}; it must be above 0 and below --context {options.context}")


def _read_times(path: Path) -> Mapping[tuple[int, int], Coefficients]:
    from megatron_ext.hot_switch.cost_model.step_time import Coefficients

    wanted = 'give JSON such as {"4,1": [1e-9, 5.6e-5, 0.057]}: by "tp,pp" the numbers a, b, c'
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
        if not isinstance(content, dict) or not content:
            raise ValueError("it is not an object with times")
        for key, numbers in content.items():
            if key.count(",") != 1 or not isinstance(numbers, list) or len(numbers) != 3:
                raise ValueError(f"{key!r} has {numbers}, which is not three numbers by tp,pp")
            if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
                raise ValueError(f"{key!r} has {numbers}, which are not all numbers")
            if not all(math.isfinite(number) and number >= 0 for number in map(float, numbers)) or not any(numbers):
                raise ValueError(f"{key!r} has {numbers}, which must be finite and 0 or more, and not all 0")
        found: dict[tuple[int, int], Coefficients] = {}
        for key, (a, b, c) in content.items():
            tp, pp = map(int, key.split(","))
            if (tp, pp) in found:
                raise ValueError(f"'{tp},{pp}' is there twice, once as {key!r}")
            found[tp, pp] = Coefficients(squared=float(a), linear=float(b), constant=float(c))
        if any(min(sizes) < 1 for sizes in found):
            raise ValueError("TP and PP must be 1 or more")
        return found
    except OSError as error:
        raise UserError(f"--times {path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--times {path}: {error}; {wanted}") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, whose keys must differ.

    Raises:
        ValueError: one is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{max(keys, key=keys.count)!r} is there twice")
    return found


def _as_object(suggestion: Suggestion) -> dict[str, Any]:
    listed = suggestion.strategies
    return {
        "strategies": [strategy.label for strategy in listed.strategies],
        "bucket_sizes": _bounds(suggestion),
        "seconds": suggestion.seconds,
        "switching_seconds": suggestion.switching,
        "compute_seconds": list(suggestion.compute),
        "memory_bytes": [round(held) for held in suggestion.memory],
        "sequences": list(suggestion.sequences),
        "positions": list(suggestion.positions),
    }


def _bounds(suggestion: Suggestion) -> list[int]:
    return sorted({bucket.up_to for bucket in suggestion.strategies.buckets} | {0}, reverse=True)


def _print_report(
    options: argparse.Namespace,
    static: list[Suggestion],
    best: Suggestion,
    *,
    measured: int,
    unused: list[tuple[int, int]],
) -> None:
    source = f"measured, for {measured} of (TP, PP) and no others" if measured else "modelled, not measured"
    print(f"times are {source}; {options.global_batch_size} sequences a step, lengths as in {options.lengths}\n")
    if unused:
        left_out = " and ".join(f"{tp},{pp}" for tp, pp in unused)
        print(f"measured, but not possible for this model on {options.gpus} GPUs: {left_out}\n")
    print("single strategies, every sequence packed into rows of the whole context:")
    for suggestion in static[:5]:
        (strategy,) = suggestion.strategies.strategies
        print(f"  {strategy.label:>10}  {suggestion.seconds:9.3f} s  {suggestion.memory[0] / _GIB:6.1f} GiB")
    listed = best.strategies
    several = len(listed.strategies) > 1
    print("\nquickest list, in the order of a step:" if several else "\nno list is quicker than:")
    order = [*range(1, len(listed.strategies)), 0]
    total = sum(best.positions)
    for number in order:
        strategy, bucket = listed.strategies[number], listed.buckets[number]
        print(
            f"  {strategy.label:>10}  {bucket.above} < length <= {bucket.up_to}: {best.sequences[number]} sequences, "
            f"{100 * best.positions[number] / total:.0f} % of the positions, {best.compute[number]:.3f} s, "
            f"{best.memory[number] / _GIB:.1f} GiB"
        )
    print(
        f"  together {best.seconds:.3f} s, {best.switching:.3f} of them switching at least: predicted to be "
        f"{static[0].seconds / best.seconds:.2f} times as fast as the best single strategy"
    )
    if several and not _is_worth_it(options, static, best):
        print(
            f"\nnot worth switching: the gain is within the error of the times (--margin {options.margin:g}; with "
            "measured --times a smaller one may do). The best single strategy:"
        )
        best = static[0]
    print(f"\n{_flags(options, best)}")


def _flags(options: argparse.Namespace, best: Suggestion) -> str:
    """Return the flags to add to a command line."""
    from megatron_ext.hot_switch.config import HotSwitchConfig

    listed = best.strategies
    flags = ["--hot-switch-strategies", *(f'"{strategy.label}"' for strategy in listed.strategies)]
    flags += ["--hot-switch-bucket-sizes", *map(str, _bounds(best))]
    if any(strategy.sequence_parallel for strategy in listed.strategies):
        flags.append("--sequence-parallel")
    if options.recompute != "none":
        flags += ["--recompute-granularity", options.recompute]
    if options.recompute == "full":
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if options.gpus_per_node != HotSwitchConfig().hot_switch_gpus_per_node:
        flags += ["--hot-switch-gpus-per-node", str(options.gpus_per_node)]
    if options.attention != "documents":
        flags += ["--hot-switch-attention", options.attention]
    return " ".join(flags)
