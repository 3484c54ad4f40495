# SPDX-License-Identifier: Apache-2.0
"""On the CPU backend a gloo group has one worker: torch's two write into one string without a lock.

All groups of a process share one thread that waits for sockets.
"""

import datetime

import pytest

from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each


def with_the_backend(script):
    """Call `script` in a process whose groups are made while the CPU backend is on."""
    from megatron_ext.backends.cpu.backend import CpuBackend
    from megatron_ext.patching import PatchRegistry

    backend, registry = CpuBackend(), PatchRegistry()
    backend.activate(registry)
    try:
        return script()
    finally:
        backend.deactivate(registry)


def options_of(group):
    import torch

    return group._get_backend(torch.device("cpu")).options


def groups_with_and_without_timeout():
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=77))
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return options_of(dist.group.WORLD)._threads, options_of(group)._threads, options_of(dist.group.WORLD)._timeout


def test_every_group_has_one_worker_and_the_timeout_that_was_asked_for():
    found = run_ranks(with_the_backend, 2, groups_with_and_without_timeout)
    assert found == [(1, 1, datetime.timedelta(seconds=77))] * 2


def group_on_an_interface(name):
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = name
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item(), len(options_of(dist.group.WORLD)._devices), options_of(dist.group.WORLD)._threads


@pytest.mark.parametrize(("names", "devices"), one_of_each([("lo", 1), ("lo,lo", 2)], {1}))
def test_the_interfaces_are_those_of_torchs_own_variable(names, devices):
    from functools import partial

    assert run_ranks(with_the_backend, 2, partial(group_on_an_interface, names)) == [(2.0, devices, 1)] * 2


def group_with_options_of_the_callers():
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 3
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1, options)
    return group.options._threads


def test_who_chooses_the_number_of_workers_keeps_it():
    assert run_ranks(with_the_backend, 1, group_with_options_of_the_callers) == [3]


def threads_of_many_groups():
    """Return how many threads wait for sockets, in this process and in one that it forks, and a sum over the groups."""
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]) for _ in range(8)]
    tensors = [torch.ones(1000) for _ in groups]
    together = zip(tensors, groups, strict=True)
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in together]:
        work.wait()
    # A group that goes takes nothing from the others.
    dist.destroy_process_group(groups.pop())
    dist.all_reduce(tensors[0], group=groups[0])
    reading, writing = os.pipe()
    if not (child := os.fork()):
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=9))
        alone.allreduce([torch.ones(1)]).wait()
        os.write(writing, bytes([socket_threads()]))
        os._exit(0)
    os.waitpid(child, 0)
    return socket_threads(), os.read(reading, 1)[0], [tensor.sum().item() for tensor in tensors]


def socket_threads():
    from pathlib import Path

    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop")


def test_all_groups_of_a_process_wait_for_sockets_in_one_thread():
    found = run_ranks(with_the_backend, 2, threads_of_many_groups)
    assert found == [(1, 1, [4000.0] + [2000.0] * 7)] * 2


def groups_after_the_backend():
    import torch.distributed as dist

    with_the_backend(lambda: None)
    dist.init_process_group("gloo")
    return options_of(dist.group.WORLD)._threads


def test_groups_are_torchs_own_again_when_the_backend_is_off():
    assert run_ranks(groups_after_the_backend, 1) == [2]
