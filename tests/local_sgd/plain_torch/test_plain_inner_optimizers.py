# SPDX-License-Identifier: Apache-2.0
"""Workers' inner optimizers are the same unless they were meant to differ, and bring their past with local SGD's."""

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import model, said_by, train, wrapped
from tests.support.distributed import run_ranks

TIMEOUT = 60.0
WAY_OUT = "; give all workers the same inner optimizer, or leave every worker its own (inner_optimizers='own')"
MORE = " (and 5 more differences of the models)"

# What worker 1 of 3 has in place of SGD without decay, and what all say.
ODD = {
    "class": (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "the class of the inner optimizer is torch.optim.sgd.SGD on workers 0, 2 and torch.optim.adamw.AdamW on worker "
        "1" + WAY_OUT,
    ),
    "decay": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, weight_decay=0.1),
        "weight_decay of parameter 0.weight is 0 on workers 0, 2 and 0.1 on worker 1" + WAY_OUT + MORE,
    ),
    "decay of a group": (
        lambda parameters: torch.optim.SGD(
            [{"params": parameters[1:]}, {"params": parameters[:1], "weight_decay": 0.1}], lr=0.02
        ),
        "weight_decay of parameter 0.weight is 0 on workers 0, 2 and 0.1 on worker 1" + WAY_OUT,
    ),
    "momentum": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
        "momentum of parameter 0.weight is 0 on workers 0, 2 and 0.9 on worker 1" + WAY_OUT + MORE.replace("5", "11"),
    ),
    "learning rate": (lambda parameters: torch.optim.SGD(parameters, lr=0.05), ""),
    "order": (lambda parameters: torch.optim.SGD(parameters[::-1], lr=0.02), ""),
    "groups": (
        lambda parameters: torch.optim.SGD([{"params": parameters[3:]}, {"params": parameters[:3]}], lr=0.02),
        "",
    ),
    "way of computing": (lambda parameters: torch.optim.SGD(parameters, lr=0.02, foreach=True), ""),
    "schedule": (lambda parameters: scheduled(torch.optim.SGD(parameters, lr=0.02)), ""),
    "what Prodigy has learned": (lambda parameters: torch.optim.SGD([{"params": parameters, **LEARNED}], lr=0.02), ""),
    "device": (
        lambda parameters: torch.optim.SGD([{"params": parameters, "where": torch.device("cuda", 1)}], lr=0.02),
        "",
    ),
    "a large setting": (
        lambda parameters: torch.optim.SGD([{"params": parameters, "scales": torch.full((1000,), 2.0)}], lr=0.02),
        f"scales of parameter 0.weight is {{digest: {0x1E4F376000000}, shape: [1000]}} on workers 0, 2 and {{digest: "
        f"{0x1E8C500000000}, shape: [1000]}} on worker 1" + WAY_OUT + MORE,
    ),
}

LEARNED = {"d": 0.3, "d_max": 0.3, "d_hat": 0.3, "d_numerator": 2.0, "d_denom": 7.0, "k": 12}

# What the others' groups hold in place of it.
USUAL = {
    "what Prodigy has learned": dict.fromkeys(LEARNED, 0.0),
    "device": {"where": torch.device("cuda", 0)},
    "a large setting": {"scales": torch.full((1000,), 1.0)},
}


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return optimizer


def with_odd_optimizer():
    """Return by what is odd about worker 1's inner optimizer what is said, and where it was meant."""
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    for what, (odd, _) in ODD.items():
        for inner in ("same", "own"):
            module = model()
            parameters = list(module.parameters())
            usual = [{"params": parameters, **USUAL.get(what, {})}]
            optimizer = odd(parameters) if rank == 1 else torch.optim.SGD(usual, lr=0.02)
            said[what, inner] = said_by(lambda o=optimizer, m=module, i=inner: wrapped(o, m, interval=2, inners=i))
    return said


@pytest.fixture(scope="module")
def refusals():
    """What every worker says to every odd optimizer of worker 1."""
    return run_ranks(with_odd_optimizer, 3, timeout=TIMEOUT)


@pytest.mark.parametrize("what", ODD)
def test_a_worker_with_another_inner_optimizer_is_refused_on_all_workers_unless_it_was_meant(what, refusals):
    for said in refusals:
        assert said[what, "same"] == ODD[what][1]
        assert said[what, "own"] == ""


def choices():
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()

    def wrap(inner):
        return said_by(lambda: wrapped(torch.optim.SGD(module.parameters(), lr=0.02), module, inners=inner))

    return wrap("any"), wrap("own" if rank else "same")


def test_the_choice_is_checked_and_the_same_on_all_workers():
    for bad, different in run_ranks(choices, 2, timeout=TIMEOUT):
        assert bad == "local SGD: inner_optimizers is 'any'; it must be 'same' or 'own'"
        assert different.startswith("local SGD: inner_optimizers is 'same' on worker 0 and 'own' on worker 1; give all")


def resumed(what):
    """Return the lines of a run that begins with an inner optimizer's state, which some way goes with local SGD's."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    adagrad = what == "made with a state"
    kind = torch.optim.Adagrad if adagrad else torch.optim.Adam

    def build():
        module = model()
        return module, kind(module.parameters(), lr=0.01)

    module, inner = build()
    optimizer = wrapped(inner, module, interval=2)
    train(module, optimizer, 6, rank)
    weights, state, past = copy.deepcopy(module.state_dict()), optimizer.state_dict(), copy.deepcopy(inner.state_dict())
    module, inner = build()
    if what == "before wrapping":
        module.load_state_dict(weights)
        inner.load_state_dict(past)
    fresh = wrapped(inner, module, interval=2)
    if what == "after wrapping" or (what == "on worker 1" and rank == 1):
        inner.load_state_dict(past)
    if what in ("with local SGD's", "one after the other"):
        module.load_state_dict(weights)
    if what == "with local SGD's":
        fresh.load_state_dict(state)
    if what == "one after the other":
        fresh.averager.load_state_dict(state["local_sgd"])
        inner.load_state_dict(past)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train(module, fresh, 5, rank)
    return [line.partition("local SGD: ")[2] for line in said.getvalue().splitlines()]


PAST = "the inner optimizer begins with a state of earlier steps{}, and local SGD with none: its anchor is the present "
BEGUN = {
    "before wrapping": PAST.format(""),
    "after wrapping": PAST.format(""),
    "on worker 1": PAST.format(" on worker 1"),
    "with local SGD's": None,
    "one after the other": None,
    "made with a state": None,
    "new": None,
}


@pytest.mark.parametrize("what", BEGUN)
def test_an_inner_optimizers_state_without_local_sgds_is_said_once(what):
    first, second = run_ranks(resumed, 2, what, timeout=TIMEOUT)
    assert second == []
    if BEGUN[what] is None:
        assert first == []
    else:
        assert len(first) == 1 and first[0].startswith(BEGUN[what])
