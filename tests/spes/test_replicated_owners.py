# SPDX-License-Identifier: Apache-2.0
"""Experts with several owners: both train them, and a round takes their mean."""

from collections.abc import Callable

import numpy as np

from tests.spes.test_feature import MODEL, expert_of
from tests.support.waiting import until
from tests.sync_service.jobs import SINGLE, has_joined, model_of, same_bits, start_job
from tests.sync_service.service import Service

OWNERS = ["0", "0,1", "1", "0,1"]
SPES = {**MODEL, "using_spes": True, "spes_expert_owners": OWNERS, "train_iters": 4}


def trained(make_service: Callable[..., Service], **options: object) -> tuple[dict[str, np.ndarray], ...]:
    """Return what two peers end with that begin with the same weights."""
    service = make_service({"demo": {"peers": 2}})
    service.start()
    first = start_job(service, "a", SINGLE, sync_service_index=0, **SPES, **options)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", SINGLE, sync_service_index=1, **SPES, **options)
    return model_of(first.result()), model_of(second.result())


def test_what_several_peers_own_is_their_mean_after_a_round(make_service: Callable[..., Service]):
    apart = trained(make_service, sync_service_interval=100)
    met = trained(make_service)
    assert same_bits(*met)
    for name, values in met[0].items():
        left, right = (model[name] for model in apart)
        owners = OWNERS[expert_of(name)] if expert_of(name) is not None else "0,1"
        assert not np.array_equal(left, right), name
        expected = {"0": left, "1": right, "0,1": (left + right) / 2}[owners]
        np.testing.assert_array_equal(values, expected, err_msg=name)
