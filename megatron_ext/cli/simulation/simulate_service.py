# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate sync-service`: jobs that meet at a sync service."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.cli.shape_options import add_shape_options
from megatron_ext.cli.simulation.model_options import MODEL, STEP, add_parameters_option, units_from
from megatron_ext.cli.simulation.service_options import peer_flags, why_refused
from megatron_ext.cli.simulation.simulation_output import add_output_options
from megatron_ext.errors import UserError, combine
from megatron_ext.extras import pip_install_extra
from megatron_ext.phrases import plural

if TYPE_CHECKING:
    from megatron_ext.simulate.job_run import SimulatedRun

__all__ = ["add_sync_service"]

_DESCRIPTION = """\
Simulate peers that meet at a sync service, event by event. When a round closes, whose contribution counts and
where a peer resumes is decided by the server's own state machine; docs/simulate.md says what is modelled.
"""

def add_sync_service(actions: Any) -> None:
    """Add the kind to the simulate subcommand."""
    from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
    from megatron_ext.simulate.training_work import SimulatedTraining

    parser = actions.add_parser(
        "sync-service",
        help="jobs that meet at a sync service",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_fields(parser.add_argument_group("peers, links, failures"), SimulatedPeers)
    add_fields(parser.add_argument_group("server"), SimulatedServer)
    add_fields(parser.add_argument_group("training"), SimulatedTraining)
    peer_flags().add(parser, "rounds, as for a peer")
    add_shape_options(parser)
    add_parameters_option(parser)
    needed = (("--peers",), ("--bandwidth",), ("--server-bandwidth",), ("--reduction",), MODEL, STEP)
    add_output_options(parser, _simulate, needed)
    parser.set_defaults(of_unknown=why_refused)


def _simulate(options: argparse.Namespace) -> tuple[str, Mapping[str, SimulatedRun]]:
    if importlib.util.find_spec("grpc") is None:
        raise UserError(f"simulate sync-service needs the service's packages; {pip_install_extra('sync')}")
    from megatron_ext.simulate.service_setup import ServiceSetup
    from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
    from megatron_ext.simulate.training_work import SimulatedTraining
    from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig

    flags = peer_flags()
    refused = flags.problems(options)
    if refused:
        raise combine(refused, "simulate")
    peers = from_options(SimulatedPeers, options)
    setup = ServiceSetup(
        peers=peers,
        server=from_options(SimulatedServer, options),
        training=from_options(SimulatedTraining, options),
        units=units_from(options, fragments=1),
        service=flags.read(
            SyncServiceConfig,
            options,
            sync_service="localhost:50051",
            sync_service_run="simulated",
            sync_service_peer="peer",
            sync_service_peers=max(peers.peers, 1),
        ),
    )
    setup.check()
    run = setup.run()
    said = (
        f"{plural(peers.peers, 'peer')} with {plural(peers.peer_gpus, 'GPU')} each, "
        f"{setup.parameters / 1e9:.2f} billion parameters, "
        f"{plural(setup.training.steps, 'step')} of {setup.step_seconds:.4g} s"
    )
    return "\n".join([said, *setup.advice(run)]), {"sync service": run}
