# SPDX-License-Identifier: Apache-2.0
"""A peer whose distributed optimizer has several instances (`--num-distributed-optimizer-instances`)."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.sync_service.jobs import Kind, die_in_step, failing_job, model_of, run_job, same_bits
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
FOUR_RANKS: Kind = ("single", "fp32-distopt", 4)
# A key's bias has nothing but rounding errors for a gradient, of which Adam makes whole steps.
NO_BIAS = {"disable_bias_linear": True}
TWO = {"num_distributed_optimizer_instances": 2, **NO_BIAS}


def test_a_peer_with_optimizer_instances_computes_what_one_has(make_service: MakeService, tmp_path: Path):
    service = make_service({name: {"peers": 1} for name in ("demo", "one", "again")})
    service.start()
    one = run_job(service, "a", FOUR_RANKS, sync_service_run="one", **NO_BIAS)
    two = run_job(service, "a", FOUR_RANKS, **TWO)
    # Each element is uploaded once, by the first instance.
    assert sum(rank.probe[2] for rank in two) == sum(rank.probe[2] for rank in one)
    assert [rank.probe[2] for rank in two[2:]] == [0, 0]
    first, second = model_of(one), model_of(two)
    for name, values in first.items():  # steps are of 0.01
        np.testing.assert_allclose(second[name], values, rtol=0, atol=1e-3, err_msg=name)
    options = {"sync_service_run": "again", "save": os.fspath(tmp_path), "save_interval": 5, **TWO}
    failing_job(service, "a", FOUR_RANKS, before=die_in_step(7), **options)
    resumed = run_job(service, "a", FOUR_RANKS, load=os.fspath(tmp_path), **options)
    assert same_bits(model_of(resumed), second)


def without_einops() -> None:
    """Before: Megatron has not found the package."""
    from megatron.core import parallel_state

    parallel_state.HAVE_EINOPS = False


def test_without_the_package_that_makes_their_groups_they_are_refused(make_service: MakeService):
    service = make_service({"demo": {"peers": 1}})
    said = failing_job(service, "a", ("single", "bf16-distopt", 2), before=without_einops, **TWO)
    assert "above 1 without einops is not supported: " in said and "pip install 'einops>=" in said
    assert "Traceback" not in said
