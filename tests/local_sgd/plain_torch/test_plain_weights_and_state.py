# SPDX-License-Identifier: Apache-2.0
"""Weights of the middle of training, and the state that belongs to them: one without the other is refused."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import flat, model, said_by, train, wrapped
from tests.local_sgd.plain_torch.replaced_weights import TIMEOUT, others, sgd
from tests.support.distributed import run_ranks


def own_weights_without_a_state():
    """Return what is said to each worker's own weights of the middle of an interval, without and with the state."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), module, interval=4)
    train(module, optimizer, 6, rank)
    weights, state = copy.deepcopy(module.state_dict()), optimizer.state_dict()
    train(module, optimizer, 9, rank, start=6)
    other = model()
    fresh = wrapped(sgd(other), other, interval=4)
    other.load_state_dict(weights)
    said = said_by(lambda: train(other, fresh, 1, rank))
    fresh.load_state_dict(state)
    train(other, fresh, 9, rank, start=6)
    return said, flat(module) == flat(other)


def test_weights_of_the_middle_of_an_interval_need_the_state_that_belongs_to_them():
    for said, is_exact in run_ranks(own_weights_without_a_state, 2, timeout=TIMEOUT):
        assert "on workers 0, 1, and the workers' differ now (0.weight and 5 more parameters); load the same" in said
        assert is_exact


def replaced_after_the_state(on, fields):
    """Return what is said where weights are replaced after a state was loaded beside those it belongs to."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), module, interval=4, **fields)
    train(module, optimizer, 6, rank)
    state = optimizer.state_dict()
    weights = copy.deepcopy(module.state_dict())
    fresh_module = model()
    fresh = wrapped(sgd(fresh_module), fresh_module, interval=4, **fields)
    fresh_module.load_state_dict(weights)
    fresh.load_state_dict(state)
    if rank in on:
        fresh_module.load_state_dict(others())
    said = said_by(lambda: train(fresh_module, fresh, 7, rank, start=6))
    fresh_module.load_state_dict(weights)
    return said, said_by(lambda: train(fresh_module, fresh, 9, rank, start=6)), fresh.averager.step


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all workers", "one worker"])
@pytest.mark.parametrize("fields", [{}, {"streaming": {"fragments": 2, "sync_delay": 2}}], ids=["plain", "delayed"])
def test_weights_that_replace_those_a_loaded_state_belongs_to_are_refused_on_all_workers(on, fields):
    own = (
        "the module's weights were replaced after local SGD's state was loaded (0.weight and 5 more parameters), which "
        "belongs to those before; load the module's weights first, then the state of the same save"
    )
    for number, found in enumerate(run_ranks(replaced_after_the_state, 2, on, fields, timeout=TIMEOUT)):
        assert found == (own if number in on else f"worker 1: {own}", "", 9)


def clipped_before_steps():
    """Return the weights of a loop that clips them before its steps, and of one that resumes in the middle of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def loop(module, optimizer, first, last):
        for step in range(first, last):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.clamp_(-0.1, 0.1)
            train(module, optimizer, step + 1, rank, start=step)

    module = model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.5), module, interval=2)
    loop(module, optimizer, 0, 4)
    again = model()
    resumed = wrapped(torch.optim.SGD(again.parameters(), lr=0.5), again, interval=2)
    again.load_state_dict(copy.deepcopy(module.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop(module, optimizer, 4, 8)
    loop(again, resumed, 4, 8)
    return flat(module), flat(again)


def test_a_loop_that_clips_weights_before_its_steps_resumes_where_it_was():
    for uninterrupted, resumed in run_ranks(clipped_before_steps, 2, timeout=TIMEOUT):
        assert uninterrupted == resumed


def saved_before_a_step(twice):
    """Return what is said to a state that is saved before the first step, when others were loaded after wrapping.

    Beside those, and beside the ones before; and the weights after some steps, of the same loaded before wrapping too.
    """
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), module, interval=2)
    if twice:
        optimizer.load_state_dict(optimizer.state_dict())
    module.load_state_dict(others())
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    again = model()
    resumed = wrapped(sgd(again), again, interval=2)
    foreign = said_by(lambda: resumed.load_state_dict(state))
    again.load_state_dict(weights)
    fitting = said_by(lambda: resumed.load_state_dict(state))
    early = model()
    early.load_state_dict(others())
    before = wrapped(sgd(early), early, interval=2)
    for each, its in ((module, optimizer), (again, resumed), (early, before)):
        train(each, its, 4, rank)
    return foreign, fitting, flat(module) == flat(again) == flat(early)


@pytest.mark.parametrize("twice", [False, True], ids=["wrapped", "its own state loaded"])
def test_a_state_that_is_saved_before_the_first_step_belongs_to_the_weights_that_all_workers_loaded(twice):
    for foreign, fitting, same in run_ranks(saved_before_a_step, 2, twice, timeout=TIMEOUT):
        assert "it belongs to other weights than the module has, which differ in 0.weight" in foreign
        assert fitting == "" and same


def in_the_middle(how):
    """Return what is said to weights that are loaded in the middle of training, on every worker."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), module, interval=4, sync_in_forward=how == "in a forward pass")
    train(module, optimizer, 2, rank)
    weights, state = copy.deepcopy(module.state_dict()), optimizer.state_dict()
    train(module, optimizer, 5, rank, start=2)
    if how == "in a forward pass":
        train(module, optimizer, 8, rank, start=5)
        said_by(lambda: module.load_state_dict(others()))
        optimizer.averager.end_round()
    if how == "a part":
        module[2].load_state_dict({"weight": torch.zeros(16, 16), "bias": torch.zeros(16)})
    elif how == "and back":
        now = copy.deepcopy(module.state_dict())
        module.load_state_dict(others())
        module.load_state_dict(now)
    elif how == "a copy":
        average = copy.deepcopy(module)
        average.load_state_dict(others())
        torch.save(module, io.BytesIO())
    elif how != "in a forward pass":
        module.load_state_dict(weights)
    if how == "with a state":
        optimizer.load_state_dict(state)
    return said_by(lambda: train(module, optimizer, 12, rank, start=8))


MIDDLE = {
    "weights alone": "0.weight and 5 more parameters",
    "a part": "2.weight and 1 more parameter",
    "and back": None,
    "a copy": None,
    "with a state": None,
    "in a forward pass": None,
}


@pytest.mark.parametrize("how", MIDDLE)
def test_weights_that_are_loaded_in_the_middle_of_training_need_a_state_unless_they_are_put_back(how):
    names = MIDDLE[how]
    for said in run_ranks(in_the_middle, 2, how, timeout=TIMEOUT):
        assert said == (
            f"the module was loaded with other weights in the middle of training ({names}), and local SGD's anchor "
            "belongs to those before; load local SGD's state of the same save after them (optimizer.load_state_dict), "
            "or wrap a new optimizer"
        ) * (names is not None)
