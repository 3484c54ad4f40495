# SPDX-License-Identifier: Apache-2.0
"""Local SGD on ordinary modules: DDP and FSDP2, the same engine, resume to the last bit."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.plain_runs import GUARD, batch, ddp, flat, model, said_by, train, wrapped
from tests.support.distributed import run_ranks

AVERAGING = {"outer_optimizer": "none"}


def against_synchronous():
    """Return the weights of local SGD with a round after every step, and of synchronous DDP."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    local, synchronous = ddp(0), torch.nn.parallel.DistributedDataParallel(model())
    train(local, wrapped(torch.optim.SGD(local.parameters(), lr=0.1), local, outer=AVERAGING), 5, rank)
    train(synchronous, torch.optim.SGD(synchronous.parameters(), lr=0.1), 5, rank)
    return flat(local), flat(synchronous)


def test_a_round_after_every_sgd_step_is_synchronous_training():
    for local, synchronous in run_ranks(against_synchronous, 2):
        assert local == pytest.approx(synchronous, rel=1e-5, abs=1e-6)


def after_warmup(steps):
    """Return the weights and the number of rounds after a warm-up of 3 steps and intervals of 2."""
    dist.init_process_group("gloo")
    module = ddp(3)
    optimizer = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, interval=2, warmup=3)
    train(module, optimizer, steps, dist.get_rank())
    return flat(module), optimizer.averager.engine.rounds


@pytest.mark.parametrize(("steps", "rounds", "equal"), [(3, 0, True), (4, 0, False), (5, 1, True), (6, 1, False)])
def test_workers_are_equal_in_warmup_and_after_rounds_only(steps, rounds, equal):
    (first, counted), (second, _) = run_ranks(after_warmup, 2, steps)
    assert counted == rounds
    assert (first == second) == equal


def resumed(folder, fields):
    """Return the weights of a straight run, and of one that a new process state takes over in mid-interval."""
    from torch.optim.lr_scheduler import ExponentialLR

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options = {"interval": 3, "warmup": 2, **fields}

    def build():
        module = ddp(2)
        return module, wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, **options)

    module, optimizer = build()
    train(module, optimizer, 12, rank)
    first, before = build()
    train(first, before, 7, rank)
    file = f"{folder}/{rank}.pt"
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)

    second, after = build()
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    # The hook counts from its own start; training is past warm-up.
    train(second.module, after, 12, rank, start=7)
    ExponentialLR(after, 0.5).step()
    return flat(module), flat(second), [group["lr"] for group in after.optim.param_groups]


@pytest.mark.parametrize(
    "fields",
    [{}, {**GUARD, "codec": "int8", "ewma_relative": True}, {"codec": "topk2"}],
    ids=["plain", "guarded int8", "2 bits"],
)
def test_a_resume_in_mid_interval_is_exact_and_schedules_still_reach_the_inner_optimizer(tmp_path, fields):
    # In the official wrapper a learning rate that is set after a load has no effect (W13).
    for straight, other, rates in run_ranks(resumed, 3 if "ewma_relative" in fields else 2, str(tmp_path), fields):
        assert straight == other
        assert rates == [0.005]


def sharded_and_whole(fields):
    """Return a sharded and an unsharded worker's weights after rounds on the same samples."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    across, inside = mesh["worker"].get_group(), mesh["shard"].get_group()
    worker = mesh["worker"].get_local_rank()
    module, whole = model(), model()
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    inner = torch.optim.Adam(module.parameters(), lr=0.01)
    options = {"interval": 2, **fields}
    # Both ranks of a worker see the same samples, so that the mean of their gradients is that of an unsharded worker.
    train(module, wrapped(inner, module, groups=(across, inside), **options), 6, worker)
    alone = torch.optim.Adam(whole.parameters(), lr=0.01)
    train(whole, wrapped(alone, whole, groups=(across, None), **options), 6, worker)
    gathered = torch.cat([value.detach().full_tensor().reshape(-1) for value in module.parameters()])
    return gathered.tolist(), flat(whole)


@pytest.mark.parametrize("fields", [{}, GUARD], ids=["plain", "guarded"])
def test_fsdp2_workers_do_what_whole_ones_do(fields):
    results = run_ranks(sharded_and_whole, 4, fields)
    for gathered, whole in results:
        assert gathered == pytest.approx(whole, rel=1e-4, abs=1e-6)
        assert gathered == results[0][0]


def beside_shards(how):
    """Return a value that both ranks of a worker hold, after a clipped round; the workers moved it by 1 and 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    held = torch.zeros(3) if how == "plain" else distribute_tensor(torch.zeros(3), mesh["shard"], [Replicate()])
    value = torch.nn.Parameter(held)
    groups = mesh["worker"].get_group(), mesh["shard"].get_group()
    optimizer = wrapped(torch.optim.SGD([value], lr=1.0), groups=groups, outer=AVERAGING, clip_pseudo_grad=1.0)
    value.grad = torch.full_like(value, -1.0 - 2.0 * mesh["worker"].get_local_rank())
    optimizer.step()
    return [value.tolist() if how == "plain" else value.to_local().tolist(), optimizer.last_round.worker_norms]


@pytest.mark.parametrize("how", ["plain", "replicated"])
def test_what_the_ranks_of_a_worker_hold_alike_counts_once_in_norms(how):
    for value, norms in run_ranks(beside_shards, 4, how):
        assert norms == pytest.approx([3**0.5, 3 * 3**0.5])
        assert value == pytest.approx([3**-0.5] * 3)


def non_finite_once(file):
    """Return the log and end of a run whose worker 1 has a non-finite gradient in the fourth step."""
    dist.init_process_group("gloo")
    module, rank = model(), dist.get_rank()
    inner = torch.optim.Adam(module.parameters(), lr=0.01)
    fields = {"skip_anomaly": True, "clip_pseudo_grad": 1e-3, "is_debug": True, "local_sgd_round_log": file}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        optimizer = wrapped(inner, module, interval=2, **fields)
        for step in range(8):
            inputs, targets = batch(step, rank)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(inputs), targets).backward()
            if (step, rank) == (3, 1):
                for parameter in module.parameters():
                    parameter.grad *= float("nan")
            optimizer.step()
    return flat(module), said.getvalue()


def test_a_worker_with_a_non_finite_gradient_is_left_out_of_one_round_which_is_written_and_said(tmp_path):
    file = tmp_path / "rounds.jsonl"
    (first, said), (second, nothing) = run_ranks(non_finite_once, 2, str(file))
    assert first == second
    assert all(value == value for value in first)
    rounds = read_rounds(file)
    assert [(entry["iteration"], sorted(entry["rejected"])) for entry in rounds] == [
        (2, []),
        (4, ["0", "2", "4"]),
        (6, []),
        (8, []),
    ]
    assert rounds[0]["cosine"] is None and rounds[-1]["cosine"] is not None
    assert "local SGD: outer round 2: left out worker 1, anomalous in 0, 2, 4 (worker 1, 0: the norm " in said
    assert "local SGD: outer round 1: clipped 0 to " in said
    assert not nothing


def train_under_ddp(hooked):
    """Return what is said while four steps are made, with a round every two."""
    dist.init_process_group("gloo")
    module, said = ddp(0) if hooked else torch.nn.parallel.DistributedDataParallel(model()), io.StringIO()
    with contextlib.redirect_stdout(said):
        train(module, wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=2), 4, dist.get_rank())
    return said.getvalue()


@pytest.mark.parametrize("hooked", [False, True])
def test_ddp_without_a_hook_is_told_once_that_rounds_save_nothing(hooked):
    first, other = run_ranks(train_under_ddp, 2, hooked)
    assert first.count("DDP averages the gradients of all workers in every step") == (0 if hooked else 1)
    assert "DDP averages" not in other


def scaled(unscale):
    """Return the weights and loss scales of a run under GradScaler in which worker 1 overflows in the third step."""
    dist.init_process_group("gloo")
    module, rank, scales = model(), dist.get_rank(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, interval=2)
    for step in range(6):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(module(inputs), targets)).backward()
        if (step, rank) == (2, 1):
            next(module.parameters()).grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return flat(module), scales, optimizer.averager.step


def test_a_step_that_a_grad_scaler_skips_on_one_worker_does_not_break_lockstep():
    # In the official wrapper it leaves that worker's counter behind (W9).
    results = [run_ranks(scaled, 2, unscale, timeout=30) for unscale in (False, True)]
    assert results[0] == results[1]
    (first, constant, steps), (second, halved, same) = results[0]
    assert first == second
    assert (steps, same) == (6, 6)
    assert constant == [4.0] * 6
    assert halved == [4.0, 4.0, 2.0, 2.0, 2.0, 2.0]


def alone():
    """Return the weights of an ordinary run, and of one with a single worker; and what is said of that."""
    dist.init_process_group("gloo")
    plain, module, said = model(), model(), io.StringIO()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), 5, 0)
    with contextlib.redirect_stdout(said):
        train(module, wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, interval=2), 5, 0)
    return flat(plain), flat(module), said.getvalue()


def test_one_worker_is_an_ordinary_run_and_is_told_so():
    ((plain, ours, said),) = run_ranks(alone, 1)
    assert ours == plain
    assert "one worker trains alone, without outer rounds" in said


def alone_in_rounds():
    """Return the weights of Lookahead by hand, and of one worker that was given an outer optimizer."""
    dist.init_process_group("gloo")
    plain, module, said = model(), model(), io.StringIO()
    slow = [value.detach().clone() for value in plain.parameters()]
    inner = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(5):
        train(plain, inner, step + 1, 0, start=step)
        if step % 2:
            with torch.no_grad():
                for held, value in zip(slow, plain.parameters(), strict=True):
                    held.lerp_(value, 0.5)
                    value.copy_(held)
    outer = {"outer_optimizer_lr": 0.5, "outer_optimizer_momentum": 0.0}
    with contextlib.redirect_stdout(said):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        train(module, wrapped(optimizer, module, interval=2, outer=outer, local_sgd_workers=1), 5, 0)
    return flat(plain), flat(module), said.getvalue()


def test_one_worker_that_is_asked_for_with_an_outer_optimizer_makes_outer_steps():
    ((by_hand, ours, said),) = run_ranks(alone_in_rounds, 1)
    assert ours == pytest.approx(by_hand, rel=1e-5, abs=1e-6)
    assert "trains alone" not in said


def alone_with(fields, outer):
    """Return what is said of options that one worker cannot use."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return said_by(lambda: wrapped(optimizer, module, outer=outer, local_sgd_workers=1, **fields))


@pytest.mark.parametrize(
    ("fields", "outer", "said"),
    [
        ({"codec": "int8"}, {}, "local_sgd_workers 1 with an outer optimizer steps by itself, and codec need others"),
        ({}, {"outer_optimizer": "none"}, "outer_optimizer none averages the weights of one worker with nobody's"),
    ],
    ids=["codec", "average"],
)
def test_what_one_worker_cannot_use_is_refused(fields, outer, said):
    assert said in run_ranks(alone_with, 1, fields, outer)[0]


def test_units_are_layers():
    from megatron_ext.local_sgd.plain_torch.parameters import unit_of

    assert [unit_of(name) for name in ("h.0.attn.weight", "h.0.mlp.0.bias", "module.layers.11.w", "0.weight")] == [
        "h.0",
        "h.0",
        "module.layers.11",
        "0",
    ]
    assert [unit_of(name) for name in ("embed.weight", "weight", "parameter3")] == ["embed", "weight", "parameter3"]


def in_another_order():
    """Return the weights after rounds of workers whose optimizers have the same parameters in different orders."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for turns in (False, True):
        module = model()
        parameters = list(module.parameters())
        inner = torch.optim.SGD(parameters[::-1] if turns and rank else parameters, lr=0.1)
        train(module, wrapped(inner, module), 3, rank)
        found.append(flat(module))
    return found


def test_optimizers_may_list_their_parameters_in_any_order():
    first, second = run_ranks(in_another_order, 2)
    assert first == second
    assert first[0] == first[1]


def hooked():
    """Return what hooks of a wrapped optimizer saw: rounds, and whose state."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=2)
    seen = []
    optimizer.register_step_pre_hook(lambda own, *given: seen.append((own is optimizer, optimizer.last_round is None)))
    handle = optimizer.register_step_post_hook(lambda *given: seen.append(optimizer.last_round is None))
    optimizer.register_state_dict_post_hook(lambda inner, state: seen.append(inner is optimizer.optim))
    train(module, optimizer, 2, dist.get_rank())
    optimizer.state_dict()
    handle.remove()
    train(module, optimizer, 3, dist.get_rank(), start=2)
    return seen


def test_hooks_run_around_the_round():
    assert run_ranks(hooked, 2) == [[(True, True), True, (True, True), False, True, (True, False)]] * 2


def non_finite_at_the_end():
    """Return whether weights and moments are finite after the workers have met in the end, of which one was
    non-finite."""
    dist.init_process_group("gloo")
    module = model()
    inner = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer = wrapped(inner, module, interval=4, skip_anomaly=True)
    for step in range(2):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        if step == 1 and dist.get_rank() == 1:
            for parameter in module.parameters():
                parameter.grad.fill_(float("nan"))
        optimizer.step()
    optimizer.averager.synchronize()
    moments = [value for state in inner.state.values() for value in state.values()]
    return [all(bool(torch.isfinite(value).all()) for value in found) for found in (module.parameters(), moments)]


def test_a_worker_that_is_left_out_in_the_end_keeps_no_non_finite_moments():
    assert run_ranks(non_finite_at_the_end, 2) == [[True, True]] * 2
