# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules without Megatron: workers whose steps a GradScaler skips catch up in rounds."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests.local_sgd.plain_runs import batch, flat, model, said_by, wrapped
from tests.support.distributed import run_ranks

TIMEOUT = 60.0
SCHEDULES = {
    "steps": lambda optimizer: [lr_scheduler.StepLR(optimizer, 2, 0.5)],
    "cosine": lambda optimizer: [lr_scheduler.CosineAnnealingLR(optimizer, 10)],
    "one cycle": lambda optimizer: [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)],
    "in a row": lambda optimizer: [
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            milestones=[3],
        )
    ],
    "two": lambda optimizer: [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.LinearLR(optimizer)],
}


def fp16_steps(module, optimizer, schedulers, steps, start=0, skipped=((2, 1),)):
    """Train as a loop does that steps its schedulers only after steps that were made.

    Args:
        module: the module.
        optimizer: its wrapped optimizer.
        schedulers: of learning rates.
        steps: after which one to end.
        start: the first one.
        skipped: (step, worker) whose gradients overflow.
    """
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(start, steps):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(module(inputs), targets)).backward()
        if (step, rank) in skipped:
            next(module.parameters()).grad[0, 0] = float("inf")
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            for scheduler in schedulers:
                scheduler.step()


def drifted(kind, aligned, fields):
    """Return rates and counts after a run on whose worker 1 a step was skipped, the weights, and what was said."""
    dist.init_process_group("gloo")
    module, said = model(), io.StringIO()
    with contextlib.redirect_stdout(said):
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), module, **fields)
        schedulers = SCHEDULES[kind](optimizer)
        if aligned:
            optimizer.align_schedulers(*schedulers)
        fp16_steps(module, optimizer, schedulers, 9)
    rates = [group["lr"] for group in optimizer.param_groups]
    return rates, [each.last_epoch for each in schedulers], flat(module), said.getvalue()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_that_skipped_steps_left_behind_catches_up_in_a_round(kind):
    # In an earlier release it stayed behind to the end, without a word.
    first, odd, last = run_ranks(drifted, 3, kind, True, {"interval": 4}, timeout=TIMEOUT)
    assert first[:2] == odd[:2] == last[:2]
    count = len(first[1])
    assert first[1] == [9] * count
    lines = [line for line in first[3].splitlines() if "last_epoch" in line]
    assert len(lines) == count
    line = "was 3 on workers 0, 2 and 2 on worker 1, because steps were skipped; it is 3 on all workers now"
    assert all(line in each for each in lines)
    assert "last_epoch" not in odd[3] and "lr of parameter group" not in first[3]


def test_learning_rates_that_differ_are_said_once_where_no_scheduler_was_given():
    first, odd, last = run_ranks(drifted, 3, "steps", False, {"interval": 3}, timeout=TIMEOUT)
    assert first[0] == last[0] and first[1] != odd[1]
    lines = [line for line in first[3].splitlines() if "lr of parameter group" in line]
    assert lines == [
        "> megatron_ext: local SGD: lr of parameter group 0 is 0.00625 on workers 0, 2 and 0.0125 on worker 1; each "
        "worker keeps its own. Where steps that a GradScaler skips leave a worker's scheduler behind, "
        "optimizer.align_schedulers(scheduler) lets it catch up in rounds"
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"gta": {"reducer": "pairwise"}, "interval": 4},
        {"streaming": {"eager": True}, "interval": 4},
        {"streaming": {"fragments": 2}, "interval": 4},
        {"sync_in_forward": True, "interval": 4},
    ],
    ids=["pairs", "eager", "fragments", "forward"],
)
def test_schedulers_catch_up_in_every_kind_of_round(fields):
    first, odd = run_ranks(drifted, 2, "cosine", True, fields, timeout=TIMEOUT)
    assert first[:2] == odd[:2]


def resumed(folder):
    """Return rates and weights of a straight run, and of one saved between a skipped step and the next round."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def build():
        module = model()
        optimizer = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, interval=4)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        optimizer.align_schedulers(scheduler)
        return module, optimizer, scheduler

    module, optimizer, scheduler = build()
    fp16_steps(module, optimizer, [scheduler], 9)
    first, before, its = build()
    fp16_steps(first, before, [its], 3)
    states = {"model": first.state_dict(), "optimizer": before.state_dict(), "scheduler": its.state_dict()}
    torch.save(states, f"{folder}/{rank}.pt")
    second, after, other = build()
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["scheduler"])
    fp16_steps(second, after, [other], 9, start=3)
    return (flat(module), scheduler.get_last_lr()), (flat(second), other.get_last_lr())


def test_a_resume_before_the_round_that_lets_a_scheduler_catch_up_is_exact(tmp_path):
    results = run_ranks(resumed, 2, str(tmp_path), timeout=TIMEOUT)
    for straight, other in results:
        assert straight == other
    assert results[0][0][1] == results[1][0][1]


def refused_schedulers():
    """Return what is said to schedulers that cannot be kept in step."""
    dist.init_process_group("gloo")
    module, rank = model(), dist.get_rank()

    def wrap(**fields):
        return wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, **fields)

    optimizer = wrap(interval=2)
    plateau, steps = lr_scheduler.ReduceLROnPlateau(optimizer), lr_scheduler.StepLR(optimizer, 2)
    return [
        said_by(lambda: optimizer.align_schedulers(plateau)),
        said_by(lambda: optimizer.align_schedulers(plateau if rank == 1 else steps)),
        said_by(lambda: optimizer.align_schedulers(*[steps] * (1 + (rank == 1)))),
        said_by(lambda: wrap(use_async=True).align_schedulers(steps)),
    ]


def test_schedulers_that_cannot_be_kept_in_step_are_refused_on_all_workers():
    for number, (metrics, odd, count, clock) in enumerate(run_ranks(refused_schedulers, 3, timeout=TIMEOUT)):
        own = "ReduceLROnPlateau steps by metrics, so that its count does not tell where it is; give all workers the"
        assert metrics.startswith(own)
        assert odd.startswith(own if number == 1 else f"worker 1: {own}")
        assert count == (
            "the number of schedulers is 1 on workers 0, 2 and 2 on worker 1; give align_schedulers the same on all "
            "workers"
        )
        assert clock.startswith("align_schedulers has no place with use_async")
