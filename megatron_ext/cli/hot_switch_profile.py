# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext hot-switch profile`: times of rows on this machine's GPUs, for `hot-switch suggest --times`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.ending import ended_by_sigterm
from megatron_ext.cli.shape_options import add_shape_options, add_topk_option, read_shape, topk_problems
from megatron_ext.errors import UserError, combine
from megatron_ext.output_files import output_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_ext.params import GptShape

__all__ = ["add_profile", "run_profile"]

_FAR_OFF = 0.25
"""Largest error of a fit above which a warning says that the times are not a sum of such terms."""

_DESCRIPTION = """\
Measure how long a row takes on one pipeline stage, forward and backward, on the installed Megatron, for
every TP and PP that is given, and fit t = a s^2 + b s + c seconds to it. A stage is built on TP
processes of this machine with 1/PP of the layers. Without GPUs it runs on CPU.
"""

_EPILOG = """\
Example:
  megatron-ext hot-switch profile --model llama-7b --tp 1 2 4 8 --pp 1 2 --output times.json
  megatron-ext hot-switch suggest --model llama-7b --gpus 8 --lengths corpus --context 32768 --times times.json
"""


def add_profile(actions: Any) -> None:
    """Add the action to the hot-switch subcommand."""
    parser = actions.add_parser(
        "profile",
        help="measure times of rows on this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_options(parser)
    for name, text in (("--tp", "tensor parallel sizes"), ("--pp", "pipeline parallel sizes")):
        parser.add_argument(name, type=int, nargs="+", default=[1], metavar="N", help=f"{text} (default 1)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096, 8192],
        metavar="TOKENS",
        help="of rows, three or more (default 1024 2048 4096 8192)",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes of each (default %(default)s)")
    parser.add_argument(
        "--recompute", choices=("none", "selective"), default="none", help="of activations (default %(default)s)"
    )
    parser.add_argument(
        "--attention",
        choices=("documents", "rows"),
        default="documents",
        help="how it is computed, as --hot-switch-attention says (default %(default)s)",
    )
    add_topk_option(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON for `suggest --times`")
    parser.set_defaults(func=run_profile)


def run_profile(options: argparse.Namespace) -> int:
    """Measure every (TP, PP), print a table, and write the file after each, so that an interruption loses one.

    Raises:
        UserError: an option cannot be as it was given, or a stage could not be run.
    """
    shape = read_shape(options)
    _check(options, shape)
    is_new = not options.output.exists()
    _write(options.output, "")
    found: dict[str, list[float]] = {}
    with ended_by_sigterm():
        try:
            _measure_all(shape, options, found)
        finally:
            if is_new and not found:
                options.output.unlink(missing_ok=True)
    print(f"\nwritten to {options.output}: use it with `megatron-ext hot-switch suggest --times {options.output}`")
    return 0


def _measure_all(shape: GptShape, options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Add the coefficients of every (TP, PP) to what is found, and print and write them."""
    from megatron_ext.hot_switch.cost_model.fit import fit_coefficients

    far_off = []
    print(
        f"{'tp,pp':>7}  " + "".join(f"{f'{length} ms':>12}" for length in options.lengths) + "   largest error of fit"
    )
    for tp in options.tp:
        for pp in options.pp:
            seconds = _measure(replace(shape, num_layers=shape.num_layers // pp), tp, options)
            fitted = fit_coefficients(options.lengths, seconds)
            found[f"{tp},{pp}"] = [fitted.squared, fitted.linear, fitted.constant]
            _write(options.output, json.dumps(found, indent=2) + "\n")
            error = max(
                abs(fitted.seconds(length**2, length) / time - 1)
                for length, time in zip(options.lengths, seconds, strict=True)
            )
            times = "".join(f"{1000 * time:>12.2f}" for time in seconds)
            print(f"{f'{tp},{pp}':>7}  {times}   {error:.1%}", flush=True)
            if error > _FAR_OFF:
                far_off.append(f"{tp},{pp}")
    if far_off:
        print(
            f"\nno a, b, c come near the times of {' and '.join(far_off)}, and `suggest` would go by something else: "
            "measure again when the machine has nothing else to do, with more --repeats or longer --lengths"
        )


def _write(file: Path, text: str) -> None:
    """Write, or say why not.

    Raises:
        UserError: it cannot be written.
    """
    try:
        # What is there stays until there is something new.
        with file.open("r+" if file.exists() and not text else "w", encoding="utf-8") as output:
            output.write(text)
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written: {error.strerror}; give another file") from None


def _check(options: argparse.Namespace, shape: GptShape) -> None:
    from megatron_ext.hot_switch.strategies.strategy import Strategy
    from megatron_ext.hot_switch.strategies.strategy_checks import model_problems

    problems = [
        f"--{name} has {value}; give numbers of at least 1"
        for name in ("tp", "pp", "lengths")
        for value in getattr(options, name)
        if value < 1
    ]
    if len(set(options.lengths)) < 3:
        problems.append("--lengths needs three different lengths or more, because three numbers are fitted")
    if options.repeats < 1:
        problems.append(f"--repeats is {options.repeats}; it must be at least 1")
    problems += topk_problems(options.moe_router_topk, shape)
    for pp in options.pp:
        if pp > 0 and shape.num_layers % pp:
            problems.append(f"--pp {pp}: {shape.num_layers} layers cannot be divided over {pp} stages; give a divisor")
    for tp in options.tp:
        if tp > 1:
            strategy = Strategy(dp=1, tp=tp, pp=1, sequence_parallel=True)
            found = model_problems(strategy, shape, [strategy])
            problems += [problem.replace(f"strategy {strategy.label}", f"--tp {tp}") for problem in found]
        if any(tp > 1 and length % tp for length in options.lengths):
            problems.append(f"--lengths cannot all be divided by --tp {tp}; give multiples of it")
    problems += output_problems("--output", options.output)
    if problems:
        raise combine(problems, "hot-switch profile")


def _measure(stage: GptShape, tp: int, options: argparse.Namespace) -> Sequence[float]:
    """Run a stage on `tp` processes; return the seconds of each length."""
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        output = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
        command += ["--log-dir", folder]
        command += ["-m", "megatron_ext.hot_switch.cost_model.stage_timing", "--shape", stage_arguments(stage)]
        command += ["--lengths", *map(str, options.lengths), "--repeats", str(options.repeats)]
        command += ["--recompute", options.recompute, "--attention", options.attention]
        command += ["--moe-router-topk", str(options.moe_router_topk), "--output", str(output)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as torchrun:
            try:
                _, said = torchrun.communicate()
            except BaseException:  # Ctrl-C too: killed, it would leave its processes to themselves
                torchrun.terminate()
                raise
        if torchrun.returncode or not output.exists():
            raise UserError(
                f"the stage with TP {tp} and {stage.num_layers} layers failed; shorter --lengths need less memory. It "
                f"ended with:\n{said[-3000:]}"
            )
        seconds: list[float] = json.loads(output.read_text(encoding="utf-8"))
    return seconds


def stage_arguments(stage: GptShape) -> str:
    """Return the fields of a stage that are not at their defaults, as JSON; the type of the parameters is left out."""
    content = {}
    for field in fields(stage):
        value = getattr(stage, field.name)
        if field.name != "dtype" and (field.default is MISSING or value != field.default):
            content[field.name] = value
    return json.dumps(content)
