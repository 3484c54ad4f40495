# SPDX-License-Identifier: Apache-2.0
"""Weights that were loaded after wrapping: all workers begin from them together, or are told that they cannot."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import batch, flat, model, said_by, train, wrapped
from tests.local_sgd.plain_torch.replaced_weights import TIMEOUT, lines_of, others, sgd
from tests.support.distributed import run_ranks

KINDS = {
    "plain": {},
    "codec": {"codec": "int8"},
    "offload": {"cpu_offload": True},
    "fragments": {"streaming": {"fragments": 2}},
    "delay": {"streaming": {"fragments": 2, "sync_delay": 1}},
    "eager": {"streaming": {"eager": True}},
    "pairs": {"gta": {"reducer": "pairwise"}},
    "forward": {"sync_in_forward": True},
}


def loaded_after_wrapping():
    """Return by kind of round the weights where all load others before the optimizer is wrapped, or after it."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for kind, fields in KINDS.items():
        before = model()
        before.load_state_dict(others())
        train(before, optimizer := wrapped(sgd(before), before, interval=4, **fields), 9, rank)
        optimizer.averager.end_round()
        after = model()
        optimizer = wrapped(sgd(after), after, interval=4, **fields)
        after.load_state_dict(others())
        lines = lines_of(lambda m=after, o=optimizer: train(m, o, 9, rank))
        optimizer.averager.end_round()
        found[kind] = flat(before), flat(after), lines
    return found


@pytest.fixture(scope="module")
def anchored():
    """What every worker has of weights that were loaded before and after the optimizer was wrapped."""
    return run_ranks(loaded_after_wrapping, 2, timeout=TIMEOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_all_workers_load_after_wrapping_are_what_the_first_round_begins_from(kind, anchored):
    for number, (before, after, lines) in enumerate(each[kind] for each in anchored):
        assert before == after
        assert lines == [
            "the module's weights were replaced after the optimizer was wrapped, alike on all workers (0.weight and 5 "
            "more parameters); the first round begins from the present ones"
        ] * (number == 0)


def written(how):
    """Return what is said where worker 1 alone replaces a weight after wrapping, and after all have loaded the same."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(sgd(module), *[module] * (how != "no module"), interval=2)
    if rank == 1:
        module[2].bias.data[3] += 1e-3
    said = said_by(lambda: train(module, optimizer, 1, rank))
    module.load_state_dict(others())
    return said, said_by(lambda: train(module, optimizer, 3, rank)), optimizer.averager.step


@pytest.mark.parametrize(("how", "name"), [("module", "2.bias"), ("no module", "parameter3")])
def test_a_worker_that_alone_replaces_a_weight_is_refused_on_all_workers_before_a_step_is_made(how, name):
    for said, fitting, steps in run_ranks(written, 3, how, timeout=TIMEOUT):
        assert said == (
            "weights were replaced after the optimizer was wrapped, on worker 1, and the workers' differ now "
            f"({name}); load the same weights on all workers, or, where they are of the middle of an interval, local "
            "SGD's state of the same save after them; where a first forward pass sets them from data, run one with the "
            "same data on all workers before wrapping"
        )
        assert (fitting, steps) == ("", 3)


def in_warmup():
    """Return what is said to weights that all workers load in warm-up, and worker 1 alone."""
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), []
    for on in ((0, 1), (1,)):
        module = model()
        optimizer = wrapped(sgd(module), module, interval=2, warmup=3)
        for step in range(4):
            if step == 1 and rank in on:
                module.load_state_dict(others())
            try:
                # The same samples, as though gradients were averaged.
                train(module, optimizer, step + 1, 0, start=step)
            except RuntimeError as error:
                said.append(str(error))
                break
    return said


def test_weights_may_be_loaded_in_warm_up_by_all_workers():
    for said in run_ranks(in_warmup, 2, timeout=TIMEOUT):
        assert len(said) == 1 and "the workers' weights differ where the anchor is to be taken" in said[0]


class Normalized(torch.nn.Module):
    """A model that changes a weight of its own in the forward pass, by what is looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(6, 4, max_norm=0.1)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, rows):
        return self.layer(self.table(rows))


def normalized_by_itself():
    """Return what is said, and the lines, where weights are normalized before the first step, and after a resume."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = Normalized()
    optimizer = wrapped(sgd(module), module, interval=3)

    def steps(module, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            module(torch.tensor([rank, rank + 2])).sum().backward()
            optimizer.step()

    lines = lines_of(lambda: steps(module, optimizer, 4))
    other = Normalized()
    fresh = wrapped(sgd(other), other, interval=3)
    other.load_state_dict(module.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    return lines + lines_of(lambda: steps(other, fresh, 3))


def test_a_weight_that_a_module_normalizes_in_its_forward_pass_was_not_replaced():
    assert run_ranks(normalized_by_itself, 2, timeout=TIMEOUT) == [[], []]


def in_shards(how):
    """Return what is said by FSDP2's workers, and the lines, where others load weights after wrapping."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    groups = mesh["worker"].get_group(), mesh["shard"].get_group()
    worker = mesh["worker"].get_local_rank()
    found = []
    for early in (True, False):
        module = model()
        for layer in module:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(module, mesh=mesh["shard"])
        inner = torch.optim.Adam(module.parameters(), lr=0.01)

        def load(module=module):
            for value, whole in zip(module.parameters(), others().values(), strict=True):
                local = torch.distributed.tensor.distribute_tensor(whole, value.device_mesh, value.placements)
                value.data.to_local().copy_(local.to_local())

        if early and how == "all":
            load()
        optimizer = wrapped(inner, module, groups=groups, interval=2)
        if not early and (how == "all" or worker == 1):
            load()
        said = []
        lines = lines_of(lambda m=module, o=optimizer, s=said: s.append(said_by(lambda: train(m, o, 4, worker))))
        weights = [value.detach().full_tensor().tolist() for value in module.parameters()]
        found.append((said[0], lines, weights))
    return found


def test_shards_of_weights_that_all_workers_load_after_wrapping_are_begun_from():
    for number, (before, after) in enumerate(run_ranks(in_shards, 4, "all", timeout=TIMEOUT)):
        assert before[0] == after[0] == "" and before[2] == after[2]
        assert before[1] == [] and len(after[1]) == (number == 0)


def test_a_worker_that_alone_loads_its_shards_is_refused_on_all_ranks():
    for _, (said, _, _) in run_ranks(in_shards, 4, "one", timeout=TIMEOUT):
        assert "weights were replaced after the optimizer was wrapped, on worker 1, and the workers' differ" in said


class ActNorm(torch.nn.Module):
    """Sets its weights from the first inputs that it sees, so that its outputs have variance one."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.is_set = False

    def forward(self, inputs):
        if not self.is_set:
            self.is_set = True
            self.scale.data.copy_(1 / inputs.std(0))
        return inputs * self.scale


def set_from_data(before_wrapping):
    """Return what is said to a module that sets weights from data, and its weights after a round."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), torch.nn.Sequential(ActNorm(), *model())
    if before_wrapping:
        module(batch(0, 0)[0])
    optimizer = wrapped(sgd(module), module, interval=2)
    return said_by(lambda: train(module, optimizer, 2, rank)), flat(module)


def test_weights_that_a_first_forward_pass_sets_from_data_are_set_before_wrapping_as_the_refusal_says():
    advice = "where a first forward pass sets them from data, run one with the same data on all workers before wrapping"
    for said, _ in run_ranks(set_from_data, 2, False, timeout=TIMEOUT):
        assert "the workers' differ now (0.scale)" in said and advice in said
    (first, its), (second, others_) = run_ranks(set_from_data, 2, True, timeout=TIMEOUT)
    assert first == second == "" and its == others_
