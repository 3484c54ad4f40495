# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate local-sgd`: a job whose workers train apart, beside synchronous training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.cli.shape_options import add_shape_options
from megatron_ext.cli.simulation.model_options import MODEL, STEP, add_parameters_option, units_from
from megatron_ext.cli.simulation.simulated_flags import ProductFlags
from megatron_ext.cli.simulation.simulation_output import add_output_options
from megatron_ext.errors import combine
from megatron_ext.phrases import plural

if TYPE_CHECKING:
    from megatron_ext.simulate.job_run import SimulatedRun

__all__ = ["add_local_sgd"]

_DESCRIPTION = """\
Simulate a job with local SGD, event by event, and synchronous training with the same workers, links and
failures. What is decided in a round (when it begins, turns and ends, what it moves, who waits for whom) is
decided by the functions of the run; docs/simulate.md says what is modelled and what is not.
"""

_SIMULATED = frozenset(
    (
        *("local_sgd_sync_interval", "local_sgd_warmup_steps", "codec", "codec_density"),
        *("use_async", "local_sgd_sync_time", "min_total_global_steps"),
        *("fragments", "pattern", "sync_delay", "update_alpha", "eager"),
    )
)

_REASONS = {
    "use_local_sgd": "is what is simulated in any case; drop it",
    "local_sgd_workers": "is --workers here; give that",
    "sync_in_forward": "lets rounds overlap with the forward pass, which is not simulated; drop it",
    "cpu_offload": "takes a worker's own time in a round; give that time as --round-work",
    "local_sgd_replay_meetings": "meets as another run did, and here the simulated clock decides; drop it",
    "reducer": "is not simulated: rounds exchange what a mean of all workers' pseudo-gradients needs; drop it",
}


def _flags() -> ProductFlags:
    from megatron_ext.local_sgd.config import LocalSGDConfig
    from megatron_ext.local_sgd.meetings.config import MeetingsConfig
    from megatron_ext.local_sgd.streaming import StreamingConfig
    from megatron_ext.outer.config import OuterOptimizerConfig
    from megatron_ext.outer.reducer_config import GTAConfig

    return ProductFlags(
        (LocalSGDConfig, StreamingConfig, MeetingsConfig, OuterOptimizerConfig, GTAConfig), _SIMULATED, _REASONS
    )


def add_local_sgd(actions: Any) -> None:
    """Add the kind to the simulate subcommand."""
    from megatron_ext.simulate.fleet import SimulatedFleet
    from megatron_ext.simulate.training_work import SimulatedTraining

    parser = actions.add_parser(
        "local-sgd",
        help="one job whose workers train apart",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_fields(parser.add_argument_group("workers, links, failures"), SimulatedFleet)
    add_fields(parser.add_argument_group("training"), SimulatedTraining)
    _flags().add(parser, "local SGD, as for a run")
    add_shape_options(parser)
    add_parameters_option(parser)
    add_output_options(parser, _simulate, (("--workers",), ("--bandwidth",), MODEL, STEP))


def _simulate(options: argparse.Namespace) -> tuple[str, Mapping[str, SimulatedRun]]:
    from megatron_ext.local_sgd.config import LocalSGDConfig
    from megatron_ext.local_sgd.streaming import StreamingConfig
    from megatron_ext.simulate.fleet import SimulatedFleet
    from megatron_ext.simulate.job_setup import JobSetup
    from megatron_ext.simulate.training_work import SimulatedTraining

    flags = _flags()
    refused = flags.problems(options)
    if refused:
        raise combine(refused, "simulate")
    fleet = from_options(SimulatedFleet, options)
    setup = JobSetup(
        fleet=fleet,
        training=from_options(SimulatedTraining, options),
        units=units_from(options, options.run_fragments),
        local_sgd=flags.read(
            LocalSGDConfig,
            options,
            use_local_sgd=True,
            local_sgd_workers=max(fleet.workers, 1),
            local_sgd_evaluation="workers",  # none is simulated, and eager updates have no other
        ),
        streaming=flags.read(StreamingConfig, options),
    )
    setup.check()
    said = (
        f"{plural(fleet.workers, 'worker')} with {plural(fleet.worker_gpus, 'GPU')} each, "
        f"{setup.parameters / 1e9:.2f} billion parameters, "
        f"{plural(setup.training.steps, 'step')} of {setup.step_seconds:.4g} s"
    )
    return said, {"synchronous": setup.baseline(), "local SGD": setup.run()}
