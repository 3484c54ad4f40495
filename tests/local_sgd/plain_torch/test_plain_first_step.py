# SPDX-License-Identifier: Apache-2.0
"""The first step compares the workers' weights; no other step without a round asks anything of them."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import model, said_by, train, wrapped
from tests.local_sgd.plain_torch.replaced_weights import TIMEOUT, sgd
from tests.support.distributed import run_ranks


def counted(fields):
    """Return by step how many digests were taken before it, and what was asked of process groups in it."""
    from megatron_ext.local_sgd.plain_torch import replaced_weights

    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    asked = []

    def noted(name, of):
        original = getattr(of, name)

        def call(*args, **kwargs):
            asked.append(name)
            return original(*args, **kwargs)

        setattr(of, name, call)

    optimizer = wrapped(sgd(module), module, interval=4, **fields)
    noted("tensor_digest", replaced_weights)
    for name in ("all_gather", "all_gather_object", "all_reduce", "broadcast", "batch_isend_irecv"):
        noted(name, dist)
    by_step = []
    for step in range(7):
        train(module, optimizer, step + 1, rank, start=step)
        by_step.append(sorted(set(asked)))
        asked.clear()
    return by_step


@pytest.mark.parametrize("fields", [{}, {"streaming": {"eager": True}}], ids=["plain", "eager"])
def test_no_step_without_a_round_but_the_first_asks_anything_of_other_workers_or_looks_at_weights(fields):
    for steps in run_ranks(counted, 2, fields, timeout=TIMEOUT):
        assert steps[0] == ["all_gather_object", "tensor_digest"]
        assert steps[3] and "tensor_digest" not in steps[3]
        # An eager round sends its second half in a later step of its interval.
        assert [steps[1], steps[2], steps[6]] == [[], [], []]


def by_themselves(what):
    """Return what is said where worker 0 does something that all have to do, while worker 1 makes its first step."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), module, interval=2)
    state = optimizer.averager.state_dict()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def alone():
        if what == "schedulers":
            optimizer.align_schedulers(scheduler)
        else:
            optimizer.averager.load_state_dict(state)

    return said_by(alone if rank == 0 else lambda: train(module, optimizer, 1, rank))


ALONE = {"schedulers": "align_schedulers()", "state": "the loading of a state"}


@pytest.mark.parametrize("what", ALONE)
def test_a_worker_that_alone_aligns_schedulers_or_loads_a_state_is_told_that_others_do_not(what):
    assert run_ranks(by_themselves, 2, what, timeout=TIMEOUT) == [
        f"ranks have come to {ALONE[what]} on worker 0 and the first step on worker 1; all ranks must make the same "
        "calls in the same order"
    ] * 2
