# SPDX-License-Identifier: Apache-2.0
"""Without Megatron, too, rounds can end layer by layer in the next forward pass, with the bits of those that do not."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_ext.errors import UserError
from tests.local_sgd.plain_runs import GUARD, flat, model, train, wrapped
from tests.support.distributed import run_ranks


class Network(torch.nn.Module):
    """A model with what is in layers and what is not; its output weights are its input weights."""

    def __init__(self, how="called"):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.enter = torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        hidden = self.enter(inputs)
        for layer in self.layers:
            if self.how == "left out" and layer is self.layers[-1]:
                continue
            if self.how == "used" and layer is self.layers[-1]:
                hidden = torch.nn.functional.linear(hidden, layer.linear1.weight)[:, :16]
            else:
                hidden = layer(hidden)
        return torch.nn.functional.linear(hidden, self.enter.weight.t())[:, :3] * self.scale


def network(kind):
    """Return a model with its processes, the workers' groups, and the number of this rank's worker."""
    module = Network()
    if kind == "ddp":
        alone, _ = dist.new_subgroups(1)
        return torch.nn.parallel.DistributedDataParallel(module, process_group=alone), None, dist.get_rank()
    if kind == "frozen":
        module.layers[1].requires_grad_(False)
    if kind == "shared":
        module.layers[2].norm2 = module.layers[0].norm1
    if kind in ("alone", "frozen", "shared"):
        return module, None, dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    sharded = {"root": [], "layers": list(module.layers), "grouped": [module.layers[0], list(module.layers[1:])]}
    for part in sharded[kind]:
        fully_shard(part, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    return module, (mesh["worker"].get_group(), mesh["shard"].get_group()), mesh["worker"].get_local_rank()


def trained(kind, fields, in_forward):
    """Return a worker's weights after 9 steps, its rounds, and how many units missed when layers of step 3 ran."""
    module, groups, number = network(kind)
    options = {"interval": 2, "groups": groups, "sync_in_forward": in_forward, **fields}
    trainable = [value for value in module.parameters() if value.requires_grad]
    optimizer = wrapped(torch.optim.Adam(trainable, lr=0.01), module, **options)
    missing = []
    if in_forward:
        hooks = optimizer.averager._hooks
        for layer in module.get_submodule("module.layers" if kind == "ddp" else "layers"):
            layer.register_forward_hook(lambda *_: missing.append(len(hooks._units) - hooks._landed))
    train(module, optimizer, 9, number)
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in module.parameters()]
    weights = torch.cat([value.detach().reshape(-1) for value in whole]).tolist()
    return weights, optimizer.averager.engine.rounds, missing[6:9]


def all_trained(kinds):
    """Return what comes of training with rounds at the end of a step, and in the next forward pass, by case."""
    dist.init_process_group("gloo")
    methods = {"plain": {}, "guarded": GUARD}
    return {
        (kind, name): (trained(kind, fields, False), trained(kind, fields, True))
        for kind in kinds
        for name, fields in methods.items()
    }


@pytest.fixture(scope="module")
def results():
    """What every rank has of every case."""
    whole = run_ranks(all_trained, 2, [kind for kind in MISSING if kind not in SHARDED])
    sharded = run_ranks(all_trained, 4, list(SHARDED))
    return [{**first, **second} for first, second in zip(whole * 2, sharded, strict=True)]


SHARDED = ("root", "layers", "grouped")
# FSDP gathers what it shards together at once, so all of that has to be there before.
MISSING = {
    "alone": [2, 1, 0],
    "ddp": [2, 1, 0],
    "frozen": [1, 1, 0],
    "shared": [1, 0, 0],
    "layers": [2, 1, 0],
    "grouped": [0, 0, 0],
    "root": [0, 0, 0],
}


@pytest.mark.parametrize("method", ["plain", "guarded"])
@pytest.mark.parametrize("kind", MISSING)
def test_the_bits_are_those_of_rounds_at_the_end_of_the_step(kind, method, results):
    for rank in results:
        at_once, in_forward = rank[kind, method]
        assert in_forward[:2] == at_once[:2]
        assert at_once[1] == 4


@pytest.mark.parametrize("kind", MISSING)
def test_a_layer_runs_while_later_ones_are_in_flight(kind, results):
    for rank in results:
        assert rank[kind, "plain"][1][2] == MISSING[kind]


def apart():
    """Return the weights after a round that one worker ended in its forward pass, and the other without one."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for in_forward in (False, True):
        module = Network()
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, sync_in_forward=in_forward)
        train(module, optimizer, 1, rank)
        if rank == 0:
            module(torch.ones(2, 8))
        optimizer.averager.land()
        report = optimizer.averager.end_round()
        found.append((flat(module), (report or optimizer.last_round).worker_norms, optimizer.averager.end_round()))
    return found


def test_workers_may_come_to_the_results_on_different_ways():
    first, second = run_ranks(apart, 2)
    assert first == second
    at_once, in_forward = first
    assert in_forward == at_once


def resumed(folder):
    """Return the weights of a straight run, and of one that was saved when a round had just begun."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def build():
        module = Network()
        inner = torch.optim.Adam(module.parameters(), lr=0.01)
        groups = dist.new_group(), None
        return module, wrapped(inner, module, interval=2, sync_in_forward=True, groups=groups)

    straight, optimizer = build()
    train(straight, optimizer, 8, rank)
    first, before = build()
    train(first, before, 4, rank)
    assert before.averager._hooks.open
    torch.save({"optimizer": before.state_dict(), "model": first.state_dict()}, f"{folder}/{rank}.pt")
    second, after = build()
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    train(second, after, 8, rank, start=4)
    optimizer.averager.synchronize()
    after.averager.synchronize()
    return flat(straight), flat(second)


def test_a_save_ends_the_round_and_a_resume_is_exact(tmp_path):
    (straight, second), other = run_ranks(resumed, 2, str(tmp_path))
    assert straight == second
    assert other == (straight, second)


def changing(module, _):
    """Change a parameter between a step and the next forward pass."""
    with torch.no_grad():
        module[0].weight.clamp_(-0.1, 0.1)
    module(torch.ones(1, 8))


def passing_by(module, optimizer):
    """Use a layer's parameters without calling it."""
    optimizer.zero_grad()
    torch.nn.functional.linear(torch.ones(1, 8), module[0].weight).sum().backward()
    optimizer.step()


def second(_, optimizer):
    """Let another averager have a round in flight in the same group."""
    other = model()
    groups = optimizer.averager._across, None
    train(other, wrapped(torch.optim.SGD(other.parameters(), lr=0.1), other, sync_in_forward=True, groups=groups), 1, 0)


REFUSED = {
    "state": (lambda module, _: module.state_dict(), "the module's state while a round is in flight: call averager"),
    "state of a layer": (lambda module, _: module[4].state_dict(), "the module's state while a round is in flight"),
    "loading": (lambda module, _: module.load_state_dict(model().state_dict()), "the module's state while a round"),
    "copy": (lambda module, _: copy.deepcopy(module), "the module's state while a round is in flight"),
    "file": (lambda module, _: torch.save(module, io.BytesIO()), "the module's state while a round is in flight"),
    "evaluation": (
        lambda module, _: torch.no_grad()(module)(torch.ones(1, 8)),
        "a forward pass without gradients while a round is in flight: call averager.end_round() on all ranks",
    ),
    "own step": (
        lambda _, optimizer: (optimizer.optim.step(), optimizer.averager.average_parameters()),
        "parameters were changed while a round was in flight; call averager.land()",
    ),
    "change": (changing, "parameter 0.weight was changed while a round is in flight: call averager.end_round()"),
    "no call": (passing_by, "the backward pass has reached 0.weight, but its module was not called"),
    "second": (second, "rounds of two averagers are in flight in one process group; give each a group"),
}
READING = ("state", "state of a layer", "loading", "copy", "file", "evaluation")


def refused():
    """Return by kind of misuse what the error says; where nothing is lost yet, training continues after the way out."""
    dist.init_process_group("gloo")
    said = {}
    for how, (misuse, _) in REFUSED.items():
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = wrapped(inner, module, sync_in_forward=True, groups=(dist.new_group(), None))
        train(module, optimizer, 1, dist.get_rank())
        try:
            misuse(module, optimizer)
        except UserError as error:
            said[how] = str(error)
        if how in READING:
            optimizer.averager.end_round()
            module.state_dict()
            torch.save(module, io.BytesIO())
            teacher = copy.deepcopy(module)
            train(module, optimizer, 2, dist.get_rank(), start=1)
            # A copy has nothing to wait for, and brings nothing.
            with torch.no_grad():
                teacher(torch.ones(1, 8))
            assert optimizer.averager._hooks.open and not optimizer.averager._hooks.complete
            teacher.state_dict()
            train(module, optimizer, 3, dist.get_rank(), start=2)
    return said


@pytest.fixture(scope="module")
def refusals():
    """What is said on every rank."""
    return run_ranks(refused, 2)


@pytest.mark.parametrize("how", REFUSED)
def test_what_would_read_or_change_half_a_round_is_refused_with_the_way_out(how, refusals):
    for said in refusals:
        assert REFUSED[how][1] in said[how]


def with_a_layer(how, in_forward):
    """Return what comes of three steps with a layer that is not called: the weights, or what the error says."""
    module = Network(how)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    groups = dist.new_group(), None
    optimizer = wrapped(inner, module, sync_in_forward=in_forward, groups=groups)
    try:
        train(module, optimizer, 3, dist.get_rank())
    except UserError as error:
        return str(error)
    optimizer.averager.end_round()
    return flat(module)


def with_layers():
    """Return what comes of layers that are left out, at the end of a step and in forward, and used without a call."""
    dist.init_process_group("gloo")
    return with_a_layer("left out", False), with_a_layer("left out", True), with_a_layer("used", True)


def test_a_layer_may_be_left_out_but_not_used_without_being_called():
    for at_once, in_forward, said in run_ranks(with_layers, 2):
        assert in_forward == at_once
        assert "the backward pass has reached layers.2.linear1.weight, but its module was not called" in said


def switched_over():
    """Return what is said of taking over a state of rounds that ended elsewhere, with a guard and without one."""
    dist.init_process_group("gloo")
    said = []
    for fields in (GUARD, {}):
        module = Network()
        module.after_the_layers = torch.nn.Linear(2, 2)
        averagers = [
            wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, sync_in_forward=way, **fields).averager
            for way in (False, True)
        ]
        try:
            averagers[1].load_state_dict(averagers[0].state_dict())
        except UserError as error:
            said.append(str(error))
    return said


def test_a_guards_experience_is_not_taken_for_that_of_other_layers():
    for said in run_ranks(switched_over, 2):
        (refused,) = said
        assert "is in the order of a run without sync_in_forward; continue like that, or start without it" in refused


def layers_before_the_rest():
    """Return the rounds of two steps, the second of which makes a forward pass by hand that begins with the layers."""
    dist.init_process_group("gloo")
    module = Network()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, sync_in_forward=True)
    train(module, optimizer, 1, dist.get_rank())
    hidden = torch.ones(2, 16)
    for layer in module.layers:
        hidden = layer(hidden)
    (hidden + module.enter(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    return optimizer.averager.engine.rounds


def test_layers_may_be_called_before_what_is_in_none():
    assert run_ranks(layers_before_the_rest, 2) == [2, 2]


def gathered_early(how):
    """Return what is said when FSDP gathers a layer before it is called."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("worker", "shard"))
    module = Network()
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    groups = mesh["worker"].get_group(), mesh["shard"].get_group()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = wrapped(inner, module, sync_in_forward=True, groups=groups)
    if how == "prefetch":
        module.layers[0].set_modules_to_forward_prefetch([module.layers[1]])
    try:
        train(module, optimizer, 1, dist.get_rank())
        module.layers[1].unshard()
        train(module, optimizer, 2, dist.get_rank(), start=1)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("unshard", "FSDP has gathered parameters (unshard()) while a round is in flight: call averager.end_round()"),
        ("prefetch", "set_modules_to_forward_prefetch gathers layers before a round has brought them; leave it away"),
    ],
)
def test_fsdp_must_not_gather_early(how, complaint):
    for said in run_ranks(gathered_early, 2, how):
        assert complaint in said


def without_the_module():
    """Return what is said when the wrapped optimizer knows no module, and when it knows a part of one."""
    dist.init_process_group("gloo")
    module, said = model(), []
    for known in (None, module[2]):
        try:
            wrapped(torch.optim.SGD(module.parameters(), lr=0.1), known, sync_in_forward=True)
        except UserError as error:
            said.append(str(error))
    return said


def test_the_module_has_to_be_known():
    ((missing, partial),) = run_ranks(without_the_module, 1)
    assert "sync_in_forward needs the module" in missing
    assert "as in StatefulPostLocalSGDOptimizer(optim, averager, model)" in missing
    assert "parameter parameter0 is not in the module" in partial
