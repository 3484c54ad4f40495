# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd report`: the outer rounds of a run, as a table and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.cli.local_sgd_suggest import add_suggest
from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install

__all__ = ["add_parser", "run_report"]

_COLUMNS = (
    *("round", "iteration", "norm", "workers' norms", "weights", "cosine", "units left out", "skipped"),
    *("MB sent", "wait s", "send s", "apply s"),
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("local-sgd", help="tools for runs with local SGD", description="Local SGD's tools.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    report = actions.add_parser(
        "report",
        help="show the outer rounds of a run",
        description="Show the outer rounds of a run, and draw them. Weights are means over units; a skipped unit went "
        "back to its anchor, because all workers were left out of it.",
    )
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's --save folder, or its file of rounds")
    report.add_argument("--last", type=int, default=20, metavar="N", help="rounds in the table (default 20; 0 = all)")
    report.add_argument("--png", type=Path, metavar="FILE", help="the picture (default: next to the file of rounds)")
    report.add_argument("--json", action="store_true", help="print the rounds as a JSON list, and draw nothing")
    report.set_defaults(func=run_report)
    add_suggest(actions)


def run_report(args: argparse.Namespace) -> int:
    """Print the table and write the picture.

    Raises:
        UserError: there are no rounds, or the picture that was asked for cannot be made.
    """
    from megatron_ext.local_sgd.reporting.round_log import read_rounds

    if args.last < 0:
        raise UserError(f"--last is {args.last}; give a number of rounds, or 0 for all")
    rounds = read_rounds(args.run_dir)
    if args.json:
        print(json.dumps(rounds, indent=2))
        return 0
    _require_whole(rounds)
    print(table(rounds[-args.last :]))
    print(f"{len(rounds)} round{'s' * (len(rounds) > 1)}, {_excluded(rounds)}")
    folder = args.run_dir if args.run_dir.is_dir() else args.run_dir.parent
    file = args.png or folder / "local_sgd_rounds.png"
    try:
        _draw(rounds, file)
    except UserError as error:
        if args.png is not None:
            raise
        print(f"no picture: {error}")
    else:
        print(f"picture: {file}")
    return 0


def _require_whole(rounds: Sequence[dict[str, Any]]) -> None:
    for entry in rounds:
        try:
            _row(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the line of round {entry['round']} is damaged ({type(error).__name__}: {error}); restore the file "
                "from a copy, or remove that line"
            ) from None


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """Return rounds as text, one line each."""
    rows = [_COLUMNS, *(_row(entry) for entry in rounds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    from megatron_ext.local_sgd.reporting.round_log import as_number, mean_weights, sending_seconds

    weights = mean_weights(entry)
    norms = [as_number(norm) for norm in entry["worker_norms"]]
    left_out: dict[int, int] = {}
    for workers in entry["rejected"].values():
        for worker in workers:
            left_out[worker] = left_out.get(worker, 0) + 1
    return (
        str(entry["round"]),
        str(entry["iteration"]),
        f"{as_number(entry['pseudo_gradient_norm']):.4g}",
        f"{min(norms):.4g} .. {max(norms):.4g}",
        f"{min(weights):.3f} .. {max(weights):.3f}" if weights else "equal",
        "-" if entry["cosine"] is None else f"{entry['cosine']:.3f}",
        ", ".join(f"worker {worker}: {units}" for worker, units in sorted(left_out.items())) or "-",
        str(len(entry.get("skipped_units", ()))),
        f"{entry['bytes_sent'] / 1e6:.2f}",
        f"{entry['waiting_seconds']:.3f}",
        f"{sending_seconds(entry):.3f}",
        f"{entry['applying_seconds']:.3f}",
    )


def _excluded(rounds: Sequence[dict[str, Any]]) -> str:
    count = sum(bool(entry["rejected"]) for entry in rounds)
    return f"{count} of which left a worker out of a unit" if count else "none of which left a worker out"


def _draw(rounds: Sequence[dict[str, Any]], file: Path) -> None:
    from megatron_ext.local_sgd.reporting.round_figure import draw_rounds

    try:
        draw_rounds(rounds, file)
    except ImportError:
        raise UserError(f"it needs matplotlib; install it with: {pip_install('matplotlib')}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    except ValueError as error:
        # matplotlib's error for an unknown file ending.
        raise UserError(f"{file} cannot be drawn: {error}") from None
