# SPDX-License-Identifier: Apache-2.0
"""Weights that were loaded behind local SGD's back: all begin from them together, or are told that they cannot."""

import contextlib
import copy
import gc
import io
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import batch, flat, model, said_by, train, wrapped
from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each

TIMEOUT = 60.0

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


def others(seed=5):
    """Return other weights of the model, the same wherever the seed is."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model().state_dict().items()}


def sgd(module, **fields):
    return torch.optim.SGD(module.parameters(), lr=0.02, **fields)


def lines_of(act):
    """Return what the first rank says while `act` runs, a line each."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        act()
    return [line.partition("local SGD: ")[2] for line in said.getvalue().splitlines()]


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


def dropped(fields):
    """Return whether engines of dropped optimizers are alive, and how many hooks the module has then."""
    dist.init_process_group("gloo")
    module, alive = model(), []
    for _ in range(3):
        optimizer = wrapped(sgd(module), module, interval=2, **fields)
        train(module, optimizer, 2, dist.get_rank())
        optimizer.averager.end_round()
        engine = weakref.ref(optimizer.averager.engine)
        del optimizer
        gc.collect()
        alive.append(engine() is not None)
    kinds = ("_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_forward_pre_hooks")
    return alive, sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)


@pytest.mark.parametrize("fields", [{}, {"sync_in_forward": True}], ids=["", "in a forward pass"])
def test_a_module_keeps_no_dropped_optimizer_of_local_sgd_alive(fields):
    assert run_ranks(dropped, 2, fields, timeout=TIMEOUT) == [([False] * 3, 0)] * 2


def dropped_in_flight():
    """Return the weights after a forward pass that ends the round of an optimizer that nobody has kept."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(sgd(module), module, interval=2, sync_in_forward=True)
    train(module, optimizer, 2, dist.get_rank())
    del optimizer
    gc.collect()
    refused = said_by(lambda: copy.deepcopy(module))
    module(torch.zeros(1, 8))
    return refused, flat(module)


def test_what_is_in_flight_still_reaches_the_module_where_the_optimizer_was_dropped():
    (refused, first), (_, second) = run_ranks(dropped_in_flight, 2, timeout=TIMEOUT)
    assert "while a round is in flight" in refused
    assert first == second


def pickled_module(path, fields):
    """Write a whole module down that an optimizer was wrapped for."""
    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(sgd(module), module, interval=2, **fields)
    train(module, optimizer, 1, 0)
    if dist.get_rank() == 0:
        torch.save(module, path)


READ = """
import sys, torch
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron_ext":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
module = torch.load(sys.argv[1], weights_only=False)
module.load_state_dict(module.state_dict())
assert module(torch.ones(1, 8)).isfinite().all()
print(sum(value.numel() for value in module.state_dict().values()))
"""


@pytest.mark.parametrize(
    "fields", one_of_each([{}, {"sync_in_forward": True}], {1}), ids=["", "in a forward pass"]
)
def test_a_pickled_module_is_read_without_this_package(tmp_path, fields):
    run_ranks(pickled_module, 2, tmp_path / "module.pt", fields, timeout=TIMEOUT)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "module.pt")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(value.numel() for value in model().state_dict().values())


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
