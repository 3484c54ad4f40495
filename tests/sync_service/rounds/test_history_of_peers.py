# SPDX-License-Identifier: Apache-2.0
"""A peer resumes from its checkpoint only where the server has the round that it continued from."""

from collections.abc import Callable

import pytest
import torch

from megatron_ext.errors import UserError
from tests.sync_service.service import Service

START = {"w": torch.zeros(64)}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("rounds", ["synchronous", "asynchronous"])
def test_rounds_that_were_made_again_are_not_those_that_a_peer_knows(
    make_service: Callable[..., Service], codec: str, rounds: str
):
    service = make_service(peers=1, rounds=rounds)
    service.start()
    with service.client("p0", START, codec=codec) as client:
        values = client.start(START)
        outcome = client.sync({"w": values["w"] + 1})
        number, digest = client.round, client.digest
        assert outcome.number == number == 1
    assert digest == service.events("committed")[1]["digest"]
    with service.client("p0", START, codec=codec) as client:
        assert client.resume(1, digest) is None
        assert (client.round, client.digest) == (1, digest)
    with service.client("p0", START, codec=codec) as client, pytest.raises(UserError, match="--no-load-optim"):
        client.resume(1, service.events("committed")[0]["digest"])
    with service.client("p0", START, codec=codec) as client:  # an older checkpoint does not know
        assert client.resume(1) is None
        assert client.digest == digest
