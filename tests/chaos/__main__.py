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
from typing import TextIO

from megatron_ext.errors import UserError, report
from tests.chaos.command_line import check, flags_of_kind, make_parser
from tests.chaos.report import as_table, figures, said_of_violations
from tests.chaos.schedule import Fault, draw, read_schedule, shrink, write_schedule
from tests.chaos.settings import Settings, peer_name
from tests.chaos.synthetic import run_synthetic
from tests.chaos.table import HEAD, last_rows, row
from tests.sync_service.service import Zygote


def main(argv: Sequence[str] | None = None) -> int:
    """Make a run, or one with each seed; return the exit status."""
    options = make_parser(__doc__).parse_args(argv)
    try:
        return _run(options)
    except UserError as error:
        report(error)
        return 2


def _run(options: argparse.Namespace) -> int:
    check(options)
    drawn = [_drawn(options, seed) for seed in options.seeds]
    _make_folder(options.dir)
    if options.table:
        faults = f"those of {options.schedule}" if options.schedule else f"{options.faults_per_hour:g} an hour"
        print(f"Minutes a seed: {options.minutes:g}; faults: {faults}.\n\n{HEAD}", flush=True)
    zygote = Zygote()
    runs = []
    try:
        for settings, faults in drawn:
            runs.append(_one(options, settings, faults, zygote))
            if options.json:
                options.json.write_text(json.dumps(runs if len(drawn) > 1 else runs[0], indent=1) + "\n")
    finally:
        zygote.close()
    if options.table:
        print(last_rows(runs), flush=True)
    return int(any(found["violations"] for found in runs))


def _drawn(options: argparse.Namespace, seed: int) -> tuple[Settings, Sequence[Fault]]:
    """Return what a seed stands for."""
    if options.jobs:
        settings = Settings.of_jobs(seed)
    else:
        settings = Settings.of_seed(
            seed, shards=options.shards, guarded=options.guards, experts=options.experts, tls=options.tls
        )
    names = [peer_name(index) for index in range(settings.peers)]
    seconds = 60 * options.minutes
    if options.schedule:
        return settings, read_schedule(options.schedule, seconds=seconds, peers=names, servers=settings.servers)
    faults = draw(
        seed, seconds=seconds, faults_per_hour=options.faults_per_hour, peers=names, servers=settings.servers
    )
    return settings, faults


def _make_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise UserError(f"--dir {folder}: {error.strerror}; give a new folder that can be written") from error
    if is_used:
        raise UserError(f"--dir {folder}: is not empty; give a new folder")


def _one(options: argparse.Namespace, settings: Settings, faults: Sequence[Fault], zygote: Zygote) -> dict:
    """Make the run of a seed, say what there is to say, and return its figures."""
    if options.dir is None:
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{settings.seed}-"))
    elif len(options.seeds) > 1:
        folder = options.dir / f"seed-{settings.seed}"
        folder.mkdir()
    else:
        folder = options.dir
    found = _made(settings, faults, 60 * options.minutes, folder / "run", zygote)
    print(row(found) if options.table else as_table(found), flush=True)
    if found["violations"]:
        # Beside the table, which is for a page.
        place = sys.stderr if options.table else sys.stdout
        if options.table:
            print("\n".join(said_of_violations(found)), file=place)
        _say_how_to_run_again(options, settings, faults, folder, zygote, place)
    elif options.dir is None:
        shutil.rmtree(folder)
    return found


def _made(settings: Settings, faults: Sequence[Fault], seconds: float, folder: Path, zygote: Zygote) -> dict:
    folder.mkdir()
    run = run_synthetic
    if settings.jobs:
        from tests.chaos.jobs import run_jobs as run  # with Megatron, which takes a while

    return figures(run(settings, faults, seconds=seconds, folder=folder, zygote=zygote))


def _say_how_to_run_again(
    options: argparse.Namespace,
    settings: Settings,
    faults: Sequence[Fault],
    folder: Path,
    zygote: Zygote,
    place: TextIO,
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
    lines = [f"seed {settings.seed}; {len(fewer)} of {len(faults)} faults, after {tried} further runs:"]
    lines += [f"  {fault}" for fault in fewer]
    lines += [
        f"files: {folder}",
        f"again: python -m tests.chaos {' '.join([*flags_of_kind(options), ''])}--seed {settings.seed} "
        f"--minutes {options.minutes:g} --schedule {path}",
    ]
    print("\n".join(lines), file=place, flush=True)


if __name__ == "__main__":
    sys.exit(main())
