# SPDX-License-Identifier: Apache-2.0
"""Jobs to simulate whose figures can be worked out by hand."""

from typing import Any

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.simulate.fleet import SimulatedFleet
from megatron_ext.simulate.job_setup import JobSetup
from megatron_ext.simulate.model_units import equal_layers
from megatron_ext.simulate.training_work import SimulatedTraining


def setup_of(
    *,
    interval: int = 1,
    layers: int = 4,
    fleet: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    streaming: dict[str, Any] | None = None,
    **local_sgd: Any,
) -> JobSetup:
    """Return 4 workers with a billion parameters, a step of 2 s, and links of a gigabyte per second."""
    whole = {"workers": 4, "bandwidth": 8.0, "latency": 0.0, **(fleet or {})}
    return JobSetup(
        fleet=SimulatedFleet(**whole),
        training=SimulatedTraining(**{"step_seconds": 2.0, "steps": 100, **(training or {})}),
        units=equal_layers(10**9, layers),
        local_sgd=LocalSGDConfig(
            use_local_sgd=True,
            local_sgd_workers=whole["workers"],
            local_sgd_sync_interval=interval,
            local_sgd_evaluation="workers",
            **local_sgd,
        ),
        streaming=StreamingConfig(**(streaming or {})),
    )
