# SPDX-License-Identifier: Apache-2.0
"""A module whose optimizer was dropped, or that is pickled, carries nothing of local SGD."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import flat, model, said_by, train, wrapped
from tests.local_sgd.plain_torch.replaced_weights import TIMEOUT, sgd
from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each


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
