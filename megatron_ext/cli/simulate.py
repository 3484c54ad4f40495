# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate`: what a run would do, by the clock, without a GPU."""

from __future__ import annotations

from typing import Any

from megatron_ext.cli.simulation.simulate_hot_switch import add_hot_switch
from megatron_ext.cli.simulation.simulate_local_sgd import add_local_sgd
from megatron_ext.cli.simulation.simulate_service import add_sync_service

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a run: utilisation, time by cause, bytes",
        description="Simulate a run event by event (docs/simulate.md): utilisation, tokens per second, bytes, and time "
        "by cause.",
    )
    actions = parser.add_subparsers(metavar="KIND", required=True)
    add_local_sgd(actions)
    add_sync_service(actions)
    add_hot_switch(actions)
