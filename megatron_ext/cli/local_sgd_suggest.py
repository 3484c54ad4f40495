# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd suggest`: interval, codec, delay and fragments for a model and a link, by arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.shape_options import add_shape_options, read_shape
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.local_sgd.round_cost import MeetingCost, WorkerLink

__all__ = ["add_suggest"]

_DESCRIPTION = """\
Propose how often workers should meet, in which codec, with which delay and in how many fragments, given the
model, the link between the workers, and the time of a worker's step. Times are arithmetic (docs/local-sgd.md
has the formulas): a round that shares its link with others, or makes a slow host work, takes longer.
"""

_INTERVALS = (1, 5, 10, 25, 50, 100, 250, 500)
_CODECS = ("fp32", "bf16", "int8", "int4")
_FRAGMENTS = (2, 4, 8, 16)
_FRAGMENT_LAYERS = 3
"""Of a fragment at least, as in the paper of Streaming DiLoCo."""
_USEFUL = 0.5
"""Utilisation below which workers wait longer than they train, so that nothing is proposed."""


def add_suggest(actions: Any) -> None:
    """Add the action to the local-sgd subcommand."""
    parser = actions.add_parser(
        "suggest",
        help="propose interval, codec, delay and fragments",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    link = parser.add_argument_group("workers and link")
    link.add_argument("--workers", type=int, required=True, metavar="W", help="how many meet")
    link.add_argument(
        "--bandwidth",
        type=float,
        required=True,
        metavar="GBIT",
        help="Gbit/s from one worker to the others, all of its links together",
    )
    link.add_argument("--latency", type=float, default=0.1, metavar="MS", help="of a message, in ms (default: 0.1)")
    link.add_argument(
        "--step-seconds", type=float, required=True, metavar="S", help="of a worker's step, as its log shows it"
    )
    link.add_argument(
        "--step-tokens", type=int, metavar="N", help="tokens of a worker's step, to be told the time of a token"
    )
    add_shape_options(parser)
    parser.add_argument("--target", type=float, default=0.95, metavar="X", help="utilisation to reach (default: 0.95)")
    parser.add_argument(
        "--longest-interval", type=int, default=100, metavar="H", help="steps between rounds at most (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print all settings as JSON")
    parser.set_defaults(func=_run)


def _run(options: argparse.Namespace) -> int:
    from megatron_ext.local_sgd.round_cost import WorkerLink, best, compare, plainest, synchronous_step
    from megatron_ext.simulate.model_units import units_of

    if not 0 < options.target < 1:
        raise UserError(f"--target is {options.target:g}; give a number between 0 and 1")
    if options.longest_interval < 1:
        raise UserError(f"--longest-interval is {options.longest_interval}; give at least 1")
    units = units_of(read_shape(options))
    link = WorkerLink(
        workers=options.workers,
        parameters=sum(units.values()),
        step_seconds=options.step_seconds,
        bandwidth=1e9 * options.bandwidth,
        latency=1e-3 * options.latency,
        step_tokens=options.step_tokens,
    )
    link.check()
    longest = options.longest_interval
    intervals = [*(number for number in _INTERVALS if number < longest), longest]
    settings = list(compare(link, intervals, _CODECS, list(_fragments(units))))
    synchronous = link.step_seconds / synchronous_step(link)
    _refuse_useless(best(settings, options.target), synchronous)
    proposed = plainest(settings, options.target)
    if options.json:
        found = {
            "synchronous": synchronous,
            "synchronous_token_seconds": link.token_seconds(synchronous),
            "settings": [asdict(one) for one in settings],
            "proposed": None if proposed is None else asdict(proposed),
        }
        print(json.dumps(found, indent=2))
        return 0
    for line in _lines(link, settings, synchronous, options.target):
        print(line)
    print(_advice(link, settings, synchronous, options.target))
    return 0


def _fragments(units: Mapping[str, int]) -> Iterator[list[int]]:
    """Yield the values of every fragment, for all numbers of fragments that are looked at."""
    from megatron_ext.local_sgd.streaming import StreamingConfig, assign_fragments, layer_count

    layers = layer_count(list(units))
    for count in _FRAGMENTS:
        if count * _FRAGMENT_LAYERS <= layers:
            members = assign_fragments(list(units), count, StreamingConfig().pattern)
            yield [sum(units[unit] for unit in fragment) for fragment in members]


def _refuse_useless(most: MeetingCost, synchronous: float) -> None:
    """Refuse a link over which nothing lets workers train for half of the time.

    Raises:
        UserError: naming what would help.
    """
    if max(most.utilisation, synchronous) < _USEFUL:
        raise UserError(
            f"nothing fits this link: workers would train for at most {100 * most.utilisation:.2g} % of the time, for "
            f"a round takes {most.round_seconds:.3g} s even in {most.codec}; a faster link, larger steps, or a longer "
            "interval (--longest-interval) would do"
        )


def _lines(
    link: WorkerLink, settings: Sequence[MeetingCost], synchronous: float, target: float
) -> Iterator[str]:
    """Yield the table: by codec and interval H, without a delay, and with the best one."""
    from megatron_ext.local_sgd.round_cost import best

    yield f"{link.parameters / 1e9:.2f} billion parameters, {link.workers} workers; an interval of H steps"
    token = link.token_seconds(synchronous)
    told = "" if token is None else f", {1e6 * token:.4g} us a token"
    yield f"synchronous training, gradients in bf16, nothing hidden: {synchronous:.3f}{told}"
    if token is None:
        yield "time is that of a step with its part of a round; --step-tokens adds that of a token"
    unit = "s/step" if token is None else "us/token"
    half = f"utilisation {unit:>9}"
    yield f"{'':<29}without a delay        with a delay"
    yield f"codec   GB     round s    H  {half}  fragments  delay  {half}"
    for codec, interval in dict.fromkeys((setting.codec, setting.interval) for setting in settings):
        of_both = [setting for setting in settings if (setting.codec, setting.interval) == (codec, interval)]
        plain, *delayed = of_both
        line = f"{codec:<7} {plain.round_bytes / 1e9:<6.2f} {plain.round_seconds:<8.3g} {interval:>4}  {_times(plain)}"
        if delayed:
            chosen = best(delayed, target)
            line += f"  {chosen.fragments:>9}  {chosen.delay:>5}  {_times(chosen)}"
        yield line


def _times(setting: MeetingCost) -> str:
    time = setting.step_seconds if setting.token_seconds is None else 1e6 * setting.token_seconds
    return f"{setting.utilisation:>11.3f} {time:>9.4g}"


def _advice(link: WorkerLink, settings: Sequence[MeetingCost], synchronous: float, target: float) -> str:
    from megatron_ext.local_sgd.round_cost import best

    if synchronous >= target:
        return f"synchronous training reaches {synchronous:.3f}: local SGD is not worth it on this link"
    found = best(settings, target)
    if found.utilisation < target:
        return (
            f"nothing here reaches {target:g}; the most is {found.utilisation:.3f}, with {_flags(link, found)}. A "
            "longer interval (--longest-interval), a faster link, or larger steps would"
        )
    gain = found.utilisation / synchronous
    token = "" if found.token_seconds is None else f", {1e6 * found.token_seconds:.4g} us a token"
    return f"proposed: {_flags(link, found)}\nutilisation {found.utilisation:.3f}{token}, {gain:.2f} times synchronous"


def _flags(link: WorkerLink, setting: MeetingCost) -> str:
    flags = [f"--use-local-sgd --local-sgd-workers {link.workers} --local-sgd-sync-interval {setting.interval}"]
    if setting.codec != "fp32":
        flags.append(f"--local-sgd-codec {setting.codec}")
    if setting.fragments > 1:
        flags.append(f"--local-sgd-fragments {setting.fragments}")
    if setting.delay:
        flags.append(f"--local-sgd-fragment-sync-delay {setting.delay} --local-sgd-fragment-update-alpha 0.5")
    return " ".join(flags)
