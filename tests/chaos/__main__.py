# SPDX-License-Identifier: Apache-2.0
"""Run the sync service under a seeded mixture of faults, and check what happened.

The status is 0 where the history is as it has to be, 1 where it is not, and 2 where the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import writable
from megatron_ext.cli.command_parser import CommandParser
from megatron_ext.errors import UserError, report
from tests.chaos.report import as_table, figures
from tests.chaos.schedule import Fault, draw, read_schedule, shrink, write_schedule
from tests.chaos.settings import Settings, peer_name
from tests.chaos.synthetic import run_synthetic
from tests.sync_service.service import Zygote

_MOST_FAULTS = 36_000
"""Of an hour: what is more often than ten a second cannot begin at its time."""
_MOST_MINUTES = 7 * 24 * 60
_MOST_RUNS = 1000
"""To shrink a schedule with."""

_DIR = (
    "an empty folder for all files of the run, which stay there (one in the system's temporary folder, removed where "
    "no rule was violated)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make a run; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except UserError as error:
        report(error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="decides the settings, the data and the faults")
    parser.add_argument("--jobs", action="store_true", help="peers that are Megatron jobs, instead of synthetic ones")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults happen (3)")
    parser.add_argument("--faults-per-hour", type=float, default=600.0, help="how many begin in the mean (600)")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="the faults of this file instead")
    parser.add_argument("--dir", type=Path, help=_DIR)
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the figures there too")
    parser.add_argument("--shrink", type=int, default=0, metavar="N", help="runs to shrink a failing schedule with (0)")
    return parser


def _run(options: argparse.Namespace) -> int:
    seconds = 60 * options.minutes
    for name, value in (("--minutes", options.minutes), ("--faults-per-hour", options.faults_per_hour)):
        if not 0 < value < float("inf"):
            raise UserError(f"{name} is {value}; it must be above 0")
    if options.minutes > _MOST_MINUTES:
        raise UserError(f"--minutes is {options.minutes:g}; give {_MOST_MINUTES} (a week) or less")
    # What torch's generator takes.
    if not 0 <= options.seed < 1 << 63:
        raise UserError(f"--seed is {options.seed}; give 0 to 2^63 - 1")
    if options.faults_per_hour > _MOST_FAULTS:
        raise UserError(f"--faults-per-hour is {options.faults_per_hour:g}; give {_MOST_FAULTS} (ten a second) or less")
    if not 0 <= options.shrink <= _MOST_RUNS:
        raise UserError(f"--shrink is {options.shrink}; give 0 to {_MOST_RUNS}")
    settings = (Settings.of_jobs if options.jobs else Settings.of_seed)(options.seed)
    names = [peer_name(index) for index in range(settings.peers)]
    if options.schedule:
        faults = read_schedule(options.schedule, seconds=seconds, peers=names)
    else:
        faults = draw(options.seed, seconds=seconds, faults_per_hour=options.faults_per_hour, peers=names)
    folder = options.dir or Path(tempfile.mkdtemp(prefix=f"chaos-{options.seed}-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise UserError(f"--dir {folder}: {error.strerror}; give a new folder that can be written") from error
    if is_used:
        raise UserError(f"--dir {folder}: is not empty; give a new folder")
    zygote = Zygote()
    try:
        found = _made(settings, faults, seconds, folder / "run", zygote)
        print(as_table(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        if found["violations"]:
            _say_how_to_run_again(options, settings, faults, folder, zygote)
        elif options.dir is None:
            shutil.rmtree(folder)
    finally:
        zygote.close()
    return int(bool(found["violations"]))


def _made(settings: Settings, faults: Sequence[Fault], seconds: float, folder: Path, zygote: Zygote) -> dict:
    folder.mkdir()
    run = run_synthetic
    if settings.jobs:
        from tests.chaos.jobs import run_jobs as run  # with Megatron, which takes a while

    return figures(run(settings, faults, seconds=seconds, folder=folder, zygote=zygote))


def _say_how_to_run_again(
    options: argparse.Namespace, settings: Settings, faults: Sequence[Fault], folder: Path, zygote: Zygote
) -> None:
    """Shrink a schedule that fails, write it down, and say how it is run again."""
    tried = 0

    def fails(fewer: Sequence[Fault]) -> bool:
        nonlocal tried
        tried += 1
        last = max((fault.at + fault.seconds for fault in fewer), default=0.0)
        return bool(_made(settings, fewer, last + 1, folder / f"shrunk{tried}", zygote)["violations"])

    fewer = shrink(faults, fails, tries=options.shrink)
    path = folder / "schedule.jsonl"
    write_schedule(path, fewer)
    print(f"seed {options.seed}; {len(fewer)} of {len(faults)} faults, after {tried} further runs:")
    for fault in fewer:
        print(f"  {fault}")
    print(
        f"files: {folder}\nagain: python -m tests.chaos {'--jobs ' if options.jobs else ''}--seed {options.seed} "
        f"--minutes {options.minutes:g} --schedule {path}"
    )


if __name__ == "__main__":
    sys.exit(main())
