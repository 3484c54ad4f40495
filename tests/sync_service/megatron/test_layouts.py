# SPDX-License-Identifier: Apache-2.0
"""However the peers of a run are cut, they compute what peers of one rank compute."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.presets import MOE, Options
from tests.support.waiting import until
from tests.sync_service.jobs import Kind, has_joined, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
ALONE: Kind = ("single", "fp32", 1)
CUT: list[Kind] = [
    ALONE,
    ("tp2-sp", "fp32", 2),
    ("pp2", "fp32", 2),
    ("moe-ep2", "fp32", 2),
    ("dp2", "fp32-distopt", 2),
    ("dp2", "fp32-fsdp2", 2),
]
MODEL = {
    **MOE,
    "moe_aux_loss_coeff": 0.0,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


MTP: Options = {"mtp_num_layers": 1, "position_embedding_type": "rope", "no_rope_fusion": True}


def trained(make_service: MakeService, kinds: list[Kind], extra: Options) -> dict[str, np.ndarray]:
    """Return what peers of these kinds end with, from the weights of the first one."""
    service = make_service({"demo": {"peers": len(kinds), **SGD}})
    service.start()
    jobs = []
    for index, (name, kind) in enumerate(zip("abcdef"[: len(kinds)], kinds, strict=True)):
        jobs.append(start_job(service, name, kind, sync_service_index=index, **MODEL, **extra))
        if index == 0:  # initial weights depend on the layout
            until(lambda: has_joined(service), "the first peer")
    models = [model_of(job.result()) for job in jobs]
    assert all(same_bits(models[0], model) for model in models[1:])
    return models[0]


@pytest.mark.parametrize(
    ("kinds", "extra"), [(CUT, {}), ([CUT[i] for i in (0, 2, 3)], MTP)], ids=["", "multi-token prediction"]
)
def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(
    make_service: MakeService, kinds: list[Kind], extra: Options
):
    mixed, alike = trained(make_service, kinds, extra), trained(make_service, [ALONE] * len(kinds), extra)
    start = untrained(make_service, extra)
    assert mixed.keys() == alike.keys()
    assert any(name.startswith("mtp.") for name in mixed) == bool(extra)
    moved = max(float(np.abs(alike[name] - start[name]).max()) for name in alike)
    assert moved > 0.05
    # Seen: 4e-5, where experts have few tokens, of whose small gradients Adam makes whole steps.
    for name, values in alike.items():
        np.testing.assert_allclose(mixed[name], values, rtol=0, atol=2e-4 * moved, err_msg=name)


def untrained(make_service: MakeService, extra: Options) -> dict[str, np.ndarray]:
    """Return the weights from which a peer of one rank begins."""
    service = make_service({"demo": {"peers": 1}})
    service.start()
    return model_of(run_job(service, "a", ALONE, **{**MODEL, **extra, "lr": 0.0, "min_lr": 0.0}))
