# SPDX-License-Identifier: Apache-2.0
"""Local SGD's state in one file of whole tensors, which any number of shards loads."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import batch, model, said_by, wrapped
from tests.support.distributed import run_ranks

# Residuals of a codec are each worker's own, and so are the steps to a round in mid-interval.
FIELDS = {"interval": 3, "codec": "int8"}
STEPS, SAVED = 7, 4


def worker_of(layout):
    """Return a module of a worker that is `layout` ranks wide, its optimizer, and this rank's worker; of 2 workers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, layout), mesh_dim_names=("worker", "shard"))
    module = model()
    if layout > 1:
        for layer in module:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh["shard"])
        fully_shard(module, mesh=mesh["shard"])
    groups = mesh["worker"].get_group(), mesh["shard"].get_group() if layout > 1 else None
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, wrapped(inner, module, groups=groups, **FIELDS), mesh["worker"].get_local_rank(), groups


def steps_of(module, optimizer, worker, start, stop):
    for step in range(start, stop):
        inputs, targets = batch(step, worker)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()


def whole_of(module):
    from torch.distributed.tensor import DTensor

    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.named_parameters()
    }


def take(module, weights):
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, value in module.named_parameters():
            new = weights[name]
            if isinstance(value, DTensor):
                new = distribute_tensor(new, value.device_mesh, value.placements)
            value.copy_(new)


def trained(shards, folder):
    """Save in mid-interval, each worker's weights beside it; return the weights of the straight run."""
    from megatron_ext.local_sgd.plain_torch import save_local_sgd_state_dict

    module, optimizer, worker, (_, inside) = worker_of(shards)
    steps_of(module, optimizer, worker, 0, SAVED)
    save_local_sgd_state_dict(optimizer, folder, group=inside, full_state_dict=True)
    weights = whole_of(module)
    torch.save(weights, Path(folder, f"weights{worker}_of_rank{dist.get_rank()}.pt"))
    steps_of(module, optimizer, worker, SAVED, STEPS)
    return {name: value.tolist() for name, value in whole_of(module).items()}


def resumed(shards, folder, weights_of, rank0_only, moved=False):
    """Load into workers of `shards` ranks; return what is said, whether the same is saved again, and the weights."""
    from megatron_ext.local_sgd.plain_torch import load_local_sgd_state_dict, save_local_sgd_state_dict

    module, optimizer, worker, (_, inside) = worker_of(shards)
    weights = torch.load(Path(folder, f"weights{worker}_of_rank{weights_of[worker]}.pt"), weights_only=True)
    if moved and worker:
        weights["0.weight"][-1] += 1  # in the last shard
    take(module, weights)

    def load():
        load_local_sgd_state_dict(optimizer, folder, group=inside, rank0_only=rank0_only, full_state_dict=True)

    said = said_by(load)
    if said:
        return said
    again = save_local_sgd_state_dict(optimizer, Path(folder, "again"), full_state_dict=True, rank0_only=False)
    before, after = (torch.load(file, weights_only=True) for file in (Path(folder, again.name), again))
    assert before["common"] and before["workers"][1]["own"]
    _require_same(before, after)
    steps_of(module, optimizer, worker, SAVED, STEPS)
    return {name: value.tolist() for name, value in whole_of(module).items()}


def _require_same(left, right):
    """Compare two states bit for bit."""
    if isinstance(left, dict):
        assert list(left) == list(right)
        left, right = list(left.values()), list(right.values())
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            _require_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


def test_a_full_state_is_loaded_into_another_number_of_shards(tmp_path):
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    straight = run_ranks(_started, 4, trained, 2, two)
    assert [path.name for path in Path(two).glob("local_sgd*")] == ["local_sgd_ckpt.pt"]
    assert run_ranks(_started, 4, resumed, 2, two, [0, 2], True) == straight
    fewer = run_ranks(_started, 2, resumed, 1, two, [0, 2], True)
    whole = run_ranks(_started, 2, trained, 1, one)
    more = run_ranks(_started, 4, resumed, 2, one, [0, 1], False)
    # Gradients are summed in another order, which may move a value to the codec's next step.
    for ended, like in [*zip(fewer, straight[::2], strict=True), *zip(more[::2], whole, strict=True)]:
        for name, values in ended.items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(like[name]), rtol=0, atol=2e-3)
    for said in run_ranks(_started, 4, resumed, 2, one, [0, 1], True, True):
        assert "it belongs to other weights than the module has, which differ in 0.weight;" in said


def _started(act, *given):
    dist.init_process_group("gloo")
    return act(*given)


def misused(folder):
    from megatron_ext.local_sgd.plain_torch import load_local_sgd_state_dict, save_local_sgd_state_dict

    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=3)
    said = [said_by(lambda: save_local_sgd_state_dict(optimizer, folder, group=dist.group.WORLD))]
    said.append(said_by(lambda: load_local_sgd_state_dict(optimizer, folder, full_state_dict=True)))
    save_local_sgd_state_dict(optimizer, folder)
    said.append(said_by(lambda: load_local_sgd_state_dict(optimizer, folder, full_state_dict=True)))
    Path(folder, "other.pt").write_bytes(Path(folder, "local_sgd_ckpt_rank0.pt").read_bytes())
    said.append(said_by(lambda: load_local_sgd_state_dict(optimizer, folder, "other", full_state_dict=True)))
    said.append(said_by(lambda: load_local_sgd_state_dict(optimizer, folder, "other")))
    save_local_sgd_state_dict(optimizer, Path(folder, "full"), full_state_dict=True, cpu_offload=False)
    Path(folder, "file").touch()
    said.append(said_by(lambda: save_local_sgd_state_dict(optimizer, Path(folder, "file"), full_state_dict=True)))
    return said


def test_files_that_were_saved_otherwise_are_refused_with_the_way_to_load_them(tmp_path):
    first, second = run_ranks(misused, 2, str(tmp_path))
    expected = (
        "group has the ranks [0, 1], and this worker's model is on [0]",
        "local_sgd_ckpt.pt: no such file",
        "no such file, but local_sgd_ckpt_rank0.pt is there; load it with full_state_dict=False",
        "it was not saved with full_state_dict=True",
        "no such file, but other.pt is there; load it with full_state_dict=True",
        "cannot be written",
    )
    for text, said in zip(expected, first, strict=True):
        assert text in said
    assert second[-1].startswith("worker 0: ")


@pytest.mark.parametrize(
    ("name", "default"),
    [("group", None), ("rank0_only", True), ("full_state_dict", False), ("cpu_offload", True)],
)
def test_arguments_have_the_defaults_of_atorch(name, default):
    from megatron_ext.local_sgd.plain_torch import save_local_sgd_state_dict

    assert inspect.signature(save_local_sgd_state_dict).parameters[name].default is default
