# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd suggest`: interval, codec and delay for a model and a link, by arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.shape_options import add_shape_options, read_shape
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.local_sgd.round_cost import MeetingCost, WorkerLink

__all__ = ["add_suggest"]

_DESCRIPTION = """\
Propose how often workers should meet, in which codec, and with which delay, given the model, the link
between the workers, and the time of a worker's step. Times are arithmetic (docs/local-sgd.md has the
formulas): a round that shares its link with others, or makes a slow host work, takes longer.
"""

_INTERVALS = (1, 5, 10, 25, 50, 100, 250, 500)
_CODECS = ("fp32", "bf16", "int8", "int4")


def add_suggest(actions: Any) -> None:
    """Add the action to the local-sgd subcommand."""
    parser = actions.add_parser(
        "suggest",
        help="propose interval, codec and delay",
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
    add_shape_options(parser)
    parser.add_argument("--target", type=float, default=0.95, metavar="X", help="utilisation to reach (default: 0.95)")
    parser.add_argument(
        "--longest-interval", type=int, default=100, metavar="H", help="steps between rounds at most (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print all settings as JSON")
    parser.set_defaults(func=_run)


def _run(options: argparse.Namespace) -> int:
    from megatron_ext.local_sgd.round_cost import WorkerLink, compare, plainest, synchronous_step
    from megatron_ext.params import gpt_parameters

    if not 0 < options.target < 1:
        raise UserError(f"--target is {options.target:g}; give a number between 0 and 1")
    if options.longest_interval < 1:
        raise UserError(f"--longest-interval is {options.longest_interval}; give at least 1")
    link = WorkerLink(
        workers=options.workers,
        parameters=sum(tensor.numel for tensor in gpt_parameters(read_shape(options))),
        step_seconds=options.step_seconds,
        bandwidth=1e9 * options.bandwidth,
        latency=1e-3 * options.latency,
    )
    link.check()
    longest = options.longest_interval
    intervals = [*(number for number in _INTERVALS if number < longest), longest]
    settings = list(compare(link, intervals, _CODECS))
    best = plainest(settings, options.target)
    synchronous = link.step_seconds / synchronous_step(link)
    if options.json:
        found = {"synchronous": synchronous, "settings": [asdict(one) for one in settings]}
        print(json.dumps({**found, "proposed": None if best is None else asdict(best)}, indent=2))
        return 0
    for line in _lines(link, settings, synchronous):
        print(line)
    print(_advice(best, settings, synchronous, options.target))
    return 0


def _lines(link: WorkerLink, settings: Sequence[MeetingCost], synchronous: float) -> Iterator[str]:
    yield f"{link.parameters / 1e9:.2f} billion parameters, {link.workers} workers; utilisation by interval H"
    yield f"synchronous training, gradients in bf16, nothing hidden: {synchronous:.3f}"
    intervals = list(dict.fromkeys(setting.interval for setting in settings))
    yield "codec   GB     round s  delay  " + "".join(f"{'H ' + str(number):>8}" for number in intervals)
    for codec in dict.fromkeys(setting.codec for setting in settings):
        of_codec = [setting for setting in settings if setting.codec == codec]
        first = of_codec[0]
        head = f"{codec:<7} {first.round_bytes / 1e9:<6.2f} {first.round_seconds:<8.3g} "
        for delayed in (False, True):
            found = {one.interval: one for one in of_codec if (one.delay > 0) == delayed}
            cells = "".join(f"{found[at].utilisation:8.3f}" if at in found else f"{'-':>8}" for at in intervals)
            yield f"{head if not delayed else ' ' * len(head)}{'yes' if delayed else 'no':<7}{cells}"


def _advice(best: MeetingCost | None, settings: Sequence[MeetingCost], synchronous: float, target: float) -> str:
    if synchronous >= target:
        return f"synchronous training reaches {synchronous:.3f}: local SGD is not worth it on this link"
    if best is None:
        most = max(settings, key=lambda setting: setting.utilisation)
        return (
            f"nothing here reaches {target:g}; the most is {most.utilisation:.3f}, with {_flags(most)}. A longer "
            "interval (--longest-interval), a faster link, or larger steps would"
        )
    gain = best.utilisation / synchronous
    return f"proposed: {_flags(best)}\nutilisation {best.utilisation:.3f}, {gain:.2f} times synchronous"


def _flags(setting: MeetingCost) -> str:
    flags = [f"--use-local-sgd --local-sgd-sync-interval {setting.interval}"]
    if setting.codec != "fp32":
        flags.append(f"--local-sgd-codec {setting.codec}")
    if setting.delay:
        flags.append(f"--local-sgd-fragment-sync-delay {setting.delay} --local-sgd-fragment-update-alpha 0.5")
    return " ".join(flags)
