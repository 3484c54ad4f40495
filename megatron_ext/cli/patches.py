# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext patches`: every patch, its target, its reason, and whether it fits the installed Megatron."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.fork.seam_fit import SeamFit
    from megatron_ext.fork.source import ForkSource

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "patches",
        help="list every patch with its target, reason and status",
        description="List every patch that any feature or backend may apply to the installed Megatron and torch.",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 when a patch would not apply where its target is to be"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument(
        "--fork",
        type=Path,
        metavar="DIR",
        help="tell which seams fit the Megatron source in this folder, of any release, and what differs; it is read, "
        "not imported",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="with --fork: print the diff with which this fork calls the wrappers itself, instead of a table",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 when `--check` found a patch that would not apply."""
    if args.fork is not None:
        return _run_fork(args)
    if args.diff:
        raise UserError("--diff is for a fork's source; say which with --fork DIR")
    from megatron_ext.activation import known_patches, registry

    statuses = registry().explain(known_patches())
    misfits = [status for status in statuses if status.status == "broken"]
    missing = [status for status in statuses if status.status == "unavailable"]
    if args.json:
        print(json.dumps([status.as_dict() for status in statuses], indent=2))
    else:
        for status in statuses:
            print(f"{status.status:<11} {status.patch.name}")
            print(f"            target: {status.patch.target}")
            print(f"            reason: {status.patch.reason}")
            if status.hook_point:
                print("            called by this fork itself")
            if status.problem:
                print(f"            problem: {status.problem}")
        print(f"{len(statuses)} patches, {len(misfits)} would not apply, {len(missing)} unavailable in this release")
    return 1 if args.check and misfits else 0


def _run_fork(args: argparse.Namespace) -> int:
    from megatron_ext.activation import known_patches
    from megatron_ext.fork.patch_set import diff
    from megatron_ext.fork.seam_fit import fit, seams_of_megatron
    from megatron_ext.fork.source import ForkSource

    source = ForkSource(args.fork)
    patches = seams_of_megatron(known_patches())
    fits = fit(source, patches)
    if args.diff:
        print(diff(source, patches), end="")
        left_out = [entry.patch.name for entry in fits if entry.status in ("missing", "differs")]
        if left_out:
            print(f"left out, see `megatron-ext patches --fork {args.fork}`: {', '.join(left_out)}", file=sys.stderr)
    elif args.json:
        print(json.dumps([entry.as_dict() for entry in fits], indent=2))
    else:
        _print_fits(source, fits)
    return 1 if args.check and any(entry.status in ("missing", "differs") for entry in fits) else 0


def _print_fits(source: ForkSource, fits: list[SeamFit]) -> None:
    from packaging.specifiers import SpecifierSet

    from megatron_ext.features import all_features
    from megatron_ext.fork.seam_fit import seams_of_megatron
    from megatron_ext.patching import MEGATRON_VERSIONS

    for entry in fits:
        print(f"{entry.status:<11} {entry.patch.name}")
        print(f"            target: {entry.patch.target}")
        if entry.file is not None:
            print(f"            in: {entry.file}:{entry.line}")
        print(f"            reason: {entry.patch.reason}")
        if entry.problem:
            print(f"            problem: {entry.problem}")
        if entry.elsewhere:
            print(f"            something of that name: {', '.join(map(str, entry.elsewhere))}")
    good = {entry.patch.name for entry in fits if entry.status == "fits"}
    print(f"Megatron {source.version} in {source.folder}: {len(good)} of {len(fits)} seams fit")
    for feature in all_features():
        names = [patch.name for patch in seams_of_megatron(feature.required_patches())]
        print(f"  {feature.name}: {sum(name in good for name in names)} of {len(names)}")
    if not SpecifierSet(MEGATRON_VERSIONS).contains(source.version, prereleases=True):
        print(f"patch_megatron() refuses this release: tested are {MEGATRON_VERSIONS}")
