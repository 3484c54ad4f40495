# SPDX-License-Identifier: Apache-2.0
"""Biases of routers across jobs: each peer's own between rounds, their mean after one, with any outer optimizer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.local_sgd.test_router_biases import BIASED, BOTH_KINDS, biases
from tests.sync_service.jobs import Kind, die_in_step, failing_job, model_of, run_job, same_bits, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}
KINDS: list[Kind] = [("moe-ep2", "bf16-distopt", 2), ("moe-ep2", "fp32", 2)]


def rounded(found: dict[str, np.ndarray]) -> list[list[float]]:
    return [values.tolist() for name, values in sorted(found.items()) if name.endswith(("expert_bias", "qb_beta"))]


@BOTH_KINDS
def test_a_round_takes_the_mean_of_the_peers_biases(make_service: MakeService, biased: dict[str, object]):
    # Peers of two kinds start a round from the first one's weights, which quantiles, unlike counts, feel.
    kinds = KINDS if biased is BIASED else KINDS[1:] * 2
    service = make_service({"demo": {"peers": 2, **SGD}})
    service.start()
    jobs = [
        start_job(service, name, kind, train_iters=4, sync_service_index=index, **biased)
        for index, (name, kind) in enumerate(zip("ab", kinds, strict=True))
    ]
    models = [model_of(job.result()) for job in jobs]
    assert same_bits(*models)
    alone = [apart(make_service, index, kind, **biased) for index, kind in enumerate(kinds)]
    assert alone[0] != alone[1]
    assert rounded(models[0]) == ((np.float32(alone[0]) + np.float32(alone[1])) / 2).tolist()


def apart(make_service: MakeService, index: int, kind: Kind, **more: object) -> list[list[float]]:
    """Return the biases of a peer that never comes to a round."""
    service = make_service({"demo": {"peers": 2, "quorum": 1, "grace_seconds": 0}})
    service.start()
    options = {"sync_service_index": index, "sync_service_interval": 100, "train_iters": 4, **more}
    return run_job(service, f"alone-{index}", kind, probe=biases, **options)[0].probe


@pytest.mark.slow
def test_a_spes_peer_that_is_killed_in_mid_interval_changes_no_bit(make_service: MakeService, tmp_path: Path):
    spes = {
        **BIASED,
        "using_spes": True,
        "spes_num_train_experts_per_node": 2,
        "spes_expert_assignment": "interleaved",
        "sync_service_codec": "int8",
    }

    def start(service: Service, name: str, kind: Kind, **more: object):
        return start_job(service, name, kind, sync_service_index="ab".index(name), **spes, **more)

    service = make_service({"demo": {"peers": 2, **SGD}})
    service.start()
    whole = [model_of(job.result()) for job in [start(service, name, KINDS[1]) for name in "ab"]]
    assert same_bits(*whole)
    assert rounded(whole[0]) != [[0.0] * 4] * 2

    service = make_service({"demo": {"peers": 2, **SGD}})
    service.start()
    lasting = start(service, "a", KINDS[1])
    folder = {"save": str(tmp_path), "save_interval": 6}
    failing_job(service, "b", KINDS[1], before=die_in_step(7), sync_service_index=1, **spes, **folder)
    again = start(service, "b", KINDS[1], load=str(tmp_path), **folder)
    assert same_bits(model_of(lasting.result()), whole[0])
    assert same_bits(model_of(again.result()), whole[0])


def test_workers_inside_a_peer_take_part_in_the_mean(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, **SGD}})
    service.start()
    workers = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 2}
    jobs = [
        start_job(service, "a", ("moe-ep2", "bf16", 4), train_iters=4, **workers, **BIASED),
        start_job(service, "b", KINDS[1], train_iters=4, **BIASED),
    ]
    # `model_of` sees to it that all workers of a job hold the same bits.
    assert same_bits(*(model_of(job.result()) for job in jobs))


def test_of_peers_that_do_not_wait_each_moves_the_biases_by_its_part_of_the_mean(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, "rounds": "asynchronous"}})
    service.start()
    found = []
    for index, name in enumerate("ab"):
        # It stays a member, having more to train.
        own = {"train_iters": 6, "exit_interval": 3, "sync_service_interval": 3, "sync_service_index": index}
        job = run_job(service, name, KINDS[1], **own, **BIASED)
        found.append(np.float32(rounded(model_of(job))))
    # The first one is alone so far. A half counts of what the second one has moved, which was by an odd number.
    alone = apart(make_service, 0, KINDS[1], train_iters=6, exit_interval=3, **BIASED)
    assert np.allclose(found[0], alone, rtol=0, atol=1e-7)
    moved = (found[1] - found[0]) / BIASED["moe_router_bias_update_rate"]
    assert np.allclose(2 * moved, np.round(2 * moved), atol=1e-3) and np.any(np.round(2 * moved) % 2)
