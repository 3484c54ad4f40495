# SPDX-License-Identifier: Apache-2.0
"""A module's buffers without Megatron: equal wherever workers meet, or each worker's own where that was asked for."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import batch, said_by, train, wrapped
from tests.support.distributed import run_ranks

TIMEOUT = 60.0


def normed():
    """Return a module with the running statistics of BatchNorm, a mask, and a cache of each worker's own."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )
    module.register_buffer("mask", torch.tensor([0.0, *[float("-inf")] * 3]))
    module.register_buffer("cache", torch.zeros(1 + dist.get_rank()), persistent=False)
    return module


def state(module):
    return {name: value.reshape(-1).tolist() for name, value in module.named_buffers()}


def trained(steps, fields, rate=0.1):
    """Return the buffers after some steps, what a mean of those before the last round would be, and what was said."""
    dist.init_process_group("gloo")
    rank, module, said = dist.get_rank(), normed(), io.StringIO()
    with contextlib.redirect_stdout(said):
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=rate), module, **fields)
        train(module, optimizer, steps - 1, rank)
        inputs, targets = batch(steps - 1, rank)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, module[1].running_mean.double())
        optimizer.step()
    mean = (torch.stack(everyone).sum(dim=0) / len(everyone)).float()
    return state(module), mean.tolist(), said.getvalue()


METHODS = {
    "plain": {"interval": 2},
    "guarded": {"interval": 2, "skip_anomaly": True, "pseudo_gradnorm_reduce": True},
    "codec": {"interval": 2, "codec": "int8"},
    "forward": {"interval": 2, "sync_in_forward": True},
    "fragments": {"interval": 2, "streaming": {"fragments": 2}},
    "delayed": {"interval": 3, "streaming": {"sync_delay": 1, "update_alpha": 0.5}},
    "end of warm-up": {"interval": 2, "warmup": 4},
}


@pytest.mark.parametrize("how", METHODS)
def test_buffers_are_equal_after_a_round_and_are_the_mean_of_the_workers(how):
    # Buffers of an earlier release stayed each worker's own without a word.
    # Without DDP nothing but a rate of zero keeps weights equal in warm-up.
    rate = 0.0 if how == "end of warm-up" else 0.1
    results = run_ranks(trained, 3, 4, METHODS[how], rate, timeout=TIMEOUT)
    (first, mean, said), *others = results
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "mask"):
        assert all(other[name] == first[name] for other, _, _ in others), name
    assert first["1.running_mean"] == mean
    assert first["1.num_batches_tracked"] == [4]
    assert first["mask"] == [0.0, *[float("-inf")] * 3]
    assert [len(found["cache"]) for found, _, _ in results] == [1, 2, 3]
    line = "local SGD: 4 buffers of the module (mask, 1.running_mean, 1.running_var, ...): made equal wherever workers"
    assert said.count(line) == 1


def test_between_rounds_and_where_it_was_asked_for_every_worker_has_its_own_buffers():
    for fields, steps, plan in (
        ({"interval": 2}, 3, "made equal wherever workers meet, by their mean (buffers='average')"),
        ({"interval": 2, "buffers": "own"}, 4, "every worker keeps its own (buffers='own')"),
    ):
        (first, _, said), (second, _, _) = run_ranks(trained, 2, steps, fields, timeout=TIMEOUT)
        assert first["1.running_mean"] != second["1.running_mean"]
        assert plan in said


def different_from_the_start():
    """Return what is said of buffers that differ when the optimizer is wrapped, by what becomes of buffers."""
    dist.init_process_group("gloo")
    module = normed()
    module[1].running_var += dist.get_rank() == 1
    return [
        said_by(lambda how=how: wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, buffers=how))
        for how in ("average", "own")
    ]


def test_buffers_that_differ_from_the_start_are_refused_unless_they_are_each_workers_own():
    for shared, own in run_ranks(different_from_the_start, 3, timeout=TIMEOUT):
        assert shared == (
            "buffer 1.running_var has other values on worker 1 than on worker 0; load the same weights on all workers "
            "before the optimizer is wrapped, or leave every worker its own (buffers='own'). Values of each worker's "
            "own, saved in the middle of an interval, are loaded afterwards"
        )
        assert own == ""


def with_bad_statistics():
    """Return the buffers after a round to which worker 1 came with a non-finite variance, and the log."""
    dist.init_process_group("gloo")
    rank, module, said = dist.get_rank(), normed(), io.StringIO()
    with contextlib.redirect_stdout(said):
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=2)
        train(module, optimizer, 1, rank)
        module[1].running_var[2] = [1.0, float("nan"), 3.0][rank]
        optimizer.step()
    return module[1].running_var.tolist(), said.getvalue()


def test_a_buffer_that_is_non_finite_is_left_out_of_the_mean_and_said():
    (first, said), *others = run_ranks(with_bad_statistics, 3, timeout=TIMEOUT)
    assert all(found == first for found, _ in others)
    assert first[2] == 2.0 and all(value == value for value in first)
    assert said.count("local SGD: buffer 1.running_var is non-finite on worker 1, which the mean over the") == 1


def refused_buffers():
    """Return what is said to buffers where no round waits for all workers, to a cache that grew, and to DDP's own."""
    dist.init_process_group("gloo")
    module = normed()

    def wrap(given=module, **fields):
        return wrapped(torch.optim.SGD(given.parameters(), lr=0.1), given, **fields)

    said = [
        said_by(lambda: wrap(gta={"reducer": "pairwise"})),
        said_by(lambda: wrap(interval=2, streaming={"eager": True})),
        said_by(lambda: wrap(buffers="mean")),
        said_by(lambda: wrap(torch.nn.parallel.DistributedDataParallel(normed()), use_async=True)),
        said_by(lambda: wrap(gta={"reducer": "pairwise"}, buffers="own")),
    ]
    optimizer = wrap(interval=2)
    if dist.get_rank() == 1:
        module.mask = torch.zeros(7)
    return [*said, said_by(lambda: train(module, optimizer, 2, dist.get_rank()))]


def test_buffers_that_cannot_be_shared_are_refused_with_the_way_out():
    for pairs, eager, word, broadcast, own, grown in run_ranks(refused_buffers, 2, timeout=TIMEOUT):
        for said in (pairs, eager):
            assert "buffer mask cannot be averaged: with reducer='pairwise' or eager=True no round waits for" in said
        assert word == "local SGD: buffers is 'mean'; it must be 'average' or 'own'"
        assert "use_async: DDP sends buffers to all workers in every forward pass" in broadcast
        assert own == ""
        assert "buffer mask had 4 elements when local SGD began, and no longer has on worker 1" in grown


def by_the_clock():
    """Return the buffers of workers of different speed after they have met in the end."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), normed()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, use_async=True, min_total_global_steps=2)
    optimizer.averager.replay([[3, 5], [2, 3]][rank])
    train(module, optimizer, [5, 3][rank], rank)
    return state(module)


def test_workers_at_their_own_speed_share_buffers_where_they_meet():
    first, second = run_ranks(by_the_clock, 2, timeout=TIMEOUT)
    for found in (first, second):
        del found["cache"]
    assert first == second
    assert first["1.num_batches_tracked"] == [5]


def resumed(folder):
    """Return weights and buffers of a straight run, and of one that continues from a save in mid-interval."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def build():
        module = normed()
        return module, wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, interval=3)

    module, optimizer = build()
    train(module, optimizer, 7, rank)
    first, before = build()
    train(first, before, 4, rank)
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, f"{folder}/{rank}.pt")
    second, after = build()
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    train(second, after, 7, rank, start=4)
    return [
        {name: value.reshape(-1).tolist() for name, value in each.state_dict().items()} for each in (module, second)
    ]


def test_a_resume_in_mid_interval_has_the_same_weights_and_buffers(tmp_path):
    for straight, other in run_ranks(resumed, 3, str(tmp_path), timeout=TIMEOUT):
        assert straight == other
