# SPDX-License-Identifier: Apache-2.0
"""Make the figures that README and docs quote, and write docs/figures.json, docs/figures.md and the tables of
benchmarks/README.md.

    python -m benchmarks.all --list
    python -m benchmarks.all --only outer_sync switch
    python -m benchmarks.all --quick

The commands of benchmarks/figures/commands.py run one at a time. The result of each stays in --folder, with the
machine, the versions and the date of that run, and is taken from there the next time unless --again is given. So hours
of runs can be interrupted, and made on several days. One that fails is reported, and the others continue.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import EachOnce, benchmark_parser, folder_for_output, one_of
from benchmarks.common import machine_and_versions
from benchmarks.figures.commands import BY_NAME, LACKING, Command
from benchmarks.figures.page import PAGE, README, write_pages
from benchmarks.figures.records import (
    FIGURES,
    DamagedError,
    Run,
    as_run,
    merged,
    read_json,
    read_run,
    read_runs,
    write_run,
    write_runs,
)

ROOT = Path(__file__).resolve().parents[1]
QUICK = 5
"""Minutes that a command may take with --quick."""

PRINTED = 200
"""Lines of a command's output that are kept, from its end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 0 if all went well, 1 if a command failed or was left out, 2 at bad input."""
    options = parser().parse_args(arguments)
    if options.again and (options.list or options.page):
        parser().error("--again has no effect with --list or --page, which run nothing; drop it")
    if options.list:
        show_list(options.folder)
        return 0
    try:
        if options.page:
            write_pages(read_runs(FIGURES), PAGE, README)
            return 0
        chosen = [BY_NAME[name] for name in options.only] if options.only else list(BY_NAME.values())
        if options.quick:
            chosen = [command for command in chosen if command.minutes <= QUICK]
        return run_all(chosen, options)
    except DamagedError as error:
        return _error(str(error), 2)


def run_all(chosen: Sequence[Command], options: argparse.Namespace) -> int:
    """Make or take the result of every command, and write figures and pages after each; return the exit status.

    Raises:
        DamagedError: docs/figures.json or benchmarks/README.md cannot be used.
    """
    known = read_runs(FIGURES)
    # Better known now than after the first hours.
    write_pages(known, PAGE, README)
    options.folder.mkdir(parents=True, exist_ok=True)
    done, bad = 0, 0
    for place, command in enumerate(chosen, 1):
        head = f"[{place}/{len(chosen)}] {command.name}"
        lacking = [need for need in command.needs if LACKING[need]()]
        try:
            run = None if options.again else kept(command, options.folder)
            if run is not None:
                print(f"{head}: of {run.date}, in {options.folder}", flush=True)
            elif lacking:
                # What a machine cannot do fails only where it was asked for by name.
                bad += bool(options.only)
                print(f"{head}: left out, it needs {' and '.join(lacking)}", flush=True)
                continue
            else:
                print(f"{head}: about {command.minutes:g} minutes", flush=True)
                run = make(command, options.folder)
        except DamagedError as error:
            bad += 1
            _error(f"{command.name}: {error}", 1)
            continue
        # After each of them, so that an interruption loses none.
        known = merged(known, [run])
        if run not in known:
            print(f"{command.name}: docs/figures.json keeps a newer run of this machine; --again makes another")
        write_runs(known, FIGURES)
        write_pages(known, PAGE, README)
        done += 1
    print(f"\n{done} of {len(chosen)} commands are in docs/figures.json and docs/figures.md")
    return 1 if bad else 0


def make(command: Command, folder: Path) -> Run:
    """Run a command, keep its result in the folder and return it.

    Raises:
        DamagedError: it failed, or its report cannot be used; the message has its last lines.
    """
    report, log = folder / f"{command.name}.report.json", folder / f"{command.name}.log"
    report.unlink(missing_ok=True)
    if command.resumes:
        shutil.rmtree(ROOT / command.resumes, ignore_errors=True)
    line = f"{command.line} --json {shlex.quote(str(report.resolve()))}" if command.writes_json else command.line
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.PIPE, text=True
        )
    if done.returncode:
        last = "\n    ".join((log.read_text(encoding="utf-8") + done.stderr).strip().splitlines()[-10:])
        raise DamagedError(f"ended with status {done.returncode}, its last lines:\n    {last}")
    found = machine_and_versions()
    if command.writes_json:
        found = read_json(report)
        if not isinstance(found, dict) or set(found) != {"machine", "versions", "cases"}:
            raise DamagedError(f"{report}: a report has exactly machine, versions and cases")
    content: dict[str, Any] = {
        "name": command.name,
        "line": command.line,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "taken_from": None,
        "cases": [],
        **found,
        "printed": without_report(log.read_text(encoding="utf-8")),
    }
    run = as_run(content, str(report))
    write_run(run, folder / f"{command.name}.json")
    return run


def kept(command: Command, folder: Path) -> Run | None:
    """Return the result of an earlier call of this very line; None where there is none."""
    path = folder / f"{command.name}.json"
    if not path.exists():
        return None
    run = read_run(path)
    return run if run.line == command.line else None


_OF_A_TRAINING_LOG = re.compile(
    r" *\[\d{4}-\d\d-\d\d .*(iteration|checkpoint)|\[Rank |Storing distributed optimizer|-{20,}|(WARNING|INFO):megatron"
)
"""Lines that Megatron prints by the hundred; validation losses are none of them."""


def without_report(text: str) -> str:
    """Return what was printed before the table of cases, the last lines of it."""
    # The folders of one machine are nobody else's.
    text = text.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")
    lines = [line.rstrip() for line in text.splitlines() if not _OF_A_TRAINING_LOG.match(line)]
    heads = [place for place, line in enumerate(lines) if line.split() == ["case", "value", "unit", "goal", "met"]]
    return "\n".join(lines[: heads[-1] if heads else None][-PRINTED:]).strip("\n")


def show_list(folder: Path) -> None:
    """Print the commands."""
    rows = [("name", "minutes", "needs", "kept", "command")]
    for command in BY_NAME.values():
        kept = "yes" if (folder / f"{command.name}.json").exists() else "-"
        rows.append((command.name, f"{command.minutes:g}", ", ".join(command.needs) or "-", kept, command.line))
    first, second, third, fourth = (max(len(row[column]) for row in rows) for column in range(4))
    for name, minutes, needs, kept, line in rows:
        # Last and to the left, so that it can be copied, however long it is.
        print(f"{name:{first}}  {minutes:>{second}}  {needs:{third}}  {kept:{fourth}}  {line}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = benchmark_parser("all", __doc__)
    what = found.add_mutually_exclusive_group()
    what.add_argument(
        "--list",
        action="store_true",
        help="show the commands, what they need and whether --folder keeps a result of each, and run nothing",
    )
    what.add_argument(
        "--only",
        nargs="+",
        type=one_of(BY_NAME, "--list"),
        action=EachOnce,
        metavar="NAME",
        help="these, by the list's names",
    )
    what.add_argument("--quick", action="store_true", help=f"only those that take {QUICK} minutes or less")
    what.add_argument("--page", action="store_true", help="only write the pages from docs/figures.json")
    found.add_argument("--again", action="store_true", help="run also what has a result in the folder")
    found.add_argument(
        "--folder",
        type=folder_for_output,
        default=ROOT / "outputs" / "figures",
        help="where results and logs of single commands are kept (outputs/figures)",
    )
    return found


def _error(text: str, status: int) -> int:
    print(f"benchmarks.all: error: {text}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
