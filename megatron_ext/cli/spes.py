# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext spes`: tools for people who come from SPES' own code."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["add_parser"]

_DESCRIPTION = """\
Print what a YAML configuration of SPES' own code is here: the server's command, the flags of a peer's
Megatron job, and what is different. Every key is accounted for; an unknown one is an error. KEY=VALUE
after the file changes a value, as --KEY=VALUE does there.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "spes",
        help="tools for people who come from SPES' own code",
        description="Tools for people who come from SPES' own code.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    translate = actions.add_parser(
        "translate-config",
        help="a configuration of SPES' own code in our words",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    translate.add_argument("file", type=Path, metavar="FILE", help="YAML file")
    translate.add_argument("changes", nargs="*", default=[], metavar="KEY=VALUE", help="as spes_config.peer_id=2")
    translate.add_argument("--peers", type=int, metavar="N", help="peers of the run (default: spes_config.num_peers)")
    translate.add_argument(
        "--ignore", action="append", default=[], metavar="KEY", help="key to leave out of account; may be repeated"
    )
    translate.add_argument("--flags-only", action="store_true", help="print the flags of a peer alone, one word a line")
    translate.set_defaults(func=_translate)


def _translate(options: argparse.Namespace) -> int:
    from megatron_ext.spes.official_config import flatten, translate

    flat = flatten(_read(options.file))
    for change in options.changes:
        key, equals, value = change.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"{change}: give KEY=VALUE, as spes_config.peer_id=2")
        flat[key] = _parsed(value, change)
    translation = translate(flat, options.peers, options.ignore)
    if options.flags_only:
        print("\n".join(translation.peer))
        return 0
    if translation.server:
        print("server:")
        print(f"  megatron-ext server start --dir STATE_DIR {shlex.join(translation.server)}\n")
    print("peer:")
    print(f"  torchrun ... -m megatron_ext pretrain_gpt.py {shlex.join(translation.peer)}\n")
    print("different here, or to be given:")
    for note in translation.notes:
        print(f"  - {note}")
    return 0


def _read(path: Path) -> dict[str, Any]:
    from megatron_ext.yaml_file import read_yaml

    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a configuration (no keys at its top)")
    return content


def _parsed(text: str, change: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{change}: the value is not YAML ({error})") from error
