# SPDX-License-Identifier: Apache-2.0
"""Runs whose peers are cut in different ways, against runs of the same peers uncut."""

from collections.abc import Callable

import numpy as np

from tests.support.presets import Options
from tests.support.waiting import until
from tests.sync_service.jobs import Kind, has_joined, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
ALONE: Kind = ("single", "fp32", 1)
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}


def assert_layouts_agree(
    make_service: MakeService, kinds: list[Kind], model: Options, **job: object
) -> dict[str, np.ndarray]:
    """Fail unless peers of these kinds end with what as many peers of one rank end with, up to rounding.

    Returns:
        The weights by global name.
    """
    mixed = _trained(make_service, kinds, model, **job)
    alike = _trained(make_service, [ALONE] * len(kinds), model, **job)
    start = _untrained(make_service, model, **job)
    assert mixed.keys() == alike.keys()
    moved = max(float(np.abs(alike[name] - start[name]).max()) for name in alike)
    assert moved > 0.05
    # Seen: 4e-5, where experts have few tokens, of whose small gradients Adam makes whole steps.
    for name, values in alike.items():
        np.testing.assert_allclose(mixed[name], values, rtol=0, atol=2e-4 * moved, err_msg=name)
    return mixed


def _trained(
    make_service: MakeService, kinds: list[Kind], model: Options, **job: object
) -> dict[str, np.ndarray]:
    """Return what peers of these kinds end with, from the weights of the first one."""
    service = make_service({"demo": {"peers": len(kinds), **SGD}})
    service.start()
    jobs = []
    for index, (name, kind) in enumerate(zip("abcdef"[: len(kinds)], kinds, strict=True)):
        jobs.append(start_job(service, name, kind, sync_service_index=index, **model, **job))
        if index == 0:  # initial weights depend on the layout
            until(lambda: has_joined(service), "the first peer")
    models = [model_of(job.result()) for job in jobs]
    assert all(same_bits(models[0], model) for model in models[1:])
    return models[0]


def _untrained(make_service: MakeService, model: Options, **job: object) -> dict[str, np.ndarray]:
    """Return the weights from which a peer of one rank begins."""
    service = make_service({"demo": {"peers": 1}})
    service.start()
    return model_of(run_job(service, "a", ALONE, **{**model, "lr": 0.0, "min_lr": 0.0}, **job))
