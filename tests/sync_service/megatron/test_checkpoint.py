# SPDX-License-Identifier: Apache-2.0
"""What of a peer's state in a checkpoint another run takes over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext
from megatron_ext.sync_service.megatron.checkpoint import Begun, begun, check_residuals, samples_notice, take_state
from megatron_ext.sync_service.peer.parts import whole_parts
from megatron_ext.sync_service.protocol.catalog import Catalog

ARGS = {
    "no_load_optim": False,
    "finetune": False,
    "sync_service_run": "demo",
    "sync_service_peer": "a",
    "sync_service_peers": 2,
    "sync_service_index": None,
    "sync_service_codec": "int4",
    "global_batch_size": 4,
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": True,
}
SAVED = {
    "format": 6,
    "run": "demo",
    "peer": "a",
    "index": 1,
    "peers": 2,
    "round": 4,
    "digest": "ab",
    "steps": 2,
    "seconds": 0.5,
    "codec": "int4",
    "residuals_of": "2 ranks, TP 2, PP 1, EP 1, a distributed optimizer",
}


def context(**args: Any) -> LoadContext:
    """Return what is read by a run with other arguments than the one that saved."""
    state = {"sync_service": dict(SAVED), "args": SimpleNamespace(global_batch_size=4)}
    return LoadContext(args=SimpleNamespace(**{**ARGS, **args}), directory="there", state=state, common_only=True)


def test_residuals_of_parts_that_a_rank_does_not_hold_are_refused():
    parts = whole_parts(Catalog.of_tensors({"one": torch.ones(3, 2), "two": torch.ones(4)}))
    keys = [part.key for part in parts]
    check_residuals({}, parts)
    check_residuals({keys[0]: torch.zeros(6)}, parts)
    for residuals in ({keys[0]: torch.zeros(4)}, {"other": torch.zeros(6)}):
        with pytest.raises(UserError, match="is not this rank's in this run"):
            check_residuals(residuals, parts)


def test_the_same_peer_resumes_where_it_was():
    assert take_state(context()) == SAVED
    assert take_state(context(sync_service_index=1)) == SAVED


@pytest.mark.parametrize(
    "change", [{"sync_service_run": "other"}, {"sync_service_peers": 4}, {"finetune": True}, {"no_load_optim": True}]
)
def test_weights_alone_begin_something_new(change: dict[str, Any]):
    assert take_state(context(**change)) is None


def test_where_an_interval_began_is_known_for_weights_alone_too():
    found = begun(context(no_load_optim=True))
    assert found == Begun(index=1, number=4, digest="ab", steps=2, batch=4)
    for change in ({"finetune": True}, {"sync_service_run": "other"}, {"sync_service_peers": 4}):
        assert begun(context(**change)) is None
    old = context(no_load_optim=True)
    old.state["sync_service"] = {"format": 3, "run": "demo", "peers": 2}
    assert begun(old) is None and take_state(old) is None


def test_a_job_that_is_not_a_peer_is_told_whose_samples_were_counted():
    read = context()
    del read.state["sync_service"]["peers"]
    assert samples_notice(read) is None  # by a release that did not say among how many peers
    read.state["sync_service"]["peers"] = 4
    assert "saved by peer 'a', part 1 of 4 of run 'demo', and has counted the samples" in str(samples_notice(read))
    read.args.finetune = True  # Megatron begins to count
    assert samples_notice(read) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sync_service_peer": "b"}, "saved by peer 'a', and --sync-service-peer is 'b'"),
        ({"sync_service_index": 0}, "saved by the peer of index 1, and --sync-service-index is 0"),
        ({"sync_service_codec": "fp32"}, "saved with --sync-service-codec int4, now it is fp32"),
        ({"world_size": 4}, "the residuals of its codec were saved by 2 ranks, TP 2, .* this run has 4 ranks, TP 2"),
        ({"global_batch_size": 8}, "saved with --global-batch-size 4, now it is 8, .* give --global-batch-size 4"),
        ({"use_distributed_optimizer": False}, "this run has 2 ranks, TP 2, PP 1, EP 1, no distributed optimizer"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(change: dict[str, Any], said: str):
    with pytest.raises(UserError, match=f"--load there: .*{said}"):
        take_state(context(**change))
