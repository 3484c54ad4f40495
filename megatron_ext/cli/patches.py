# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext patches`: every patch, its target, its reason, and whether it fits the installed Megatron."""

from __future__ import annotations

import argparse
import json
from typing import Any

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
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 when `--check` found a patch that would not apply."""
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
            if status.problem:
                print(f"            problem: {status.problem}")
        print(f"{len(statuses)} patches, {len(misfits)} would not apply, {len(missing)} unavailable in this release")
    return 1 if args.check and misfits else 0
