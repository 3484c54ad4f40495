# SPDX-License-Identifier: Apache-2.0
"""The CPU backend by itself: what is CUDA's becomes the CPU's, random numbers stay apart, all is undone."""

import logging
import os
import sys

import pytest

from tests.support.distributed import run_ranks, run_successful_ranks


def activated():
    """Switch the backend on in this rank; return it with its registry."""
    from megatron_ext.backends.cpu import CpuBackend
    from megatron_ext.patching import PatchRegistry

    registry = PatchRegistry()
    backend = CpuBackend()
    backend.activate(registry)
    return backend, registry


def global_state():
    """Everything that the backend changes and that is not a patched attribute."""
    import torch
    from torch._dynamo import eval_frame

    tracker = logging.getLogger("megatron.core.tensor_parallel.random")
    return eval_frame._stance, tuple(tracker.filters), len(torch.overrides._get_current_function_mode_stack())


def activate_and_deactivate():
    """Return which places stayed the same while the backend was on, and which differed afterwards."""
    from megatron_ext.backends import cpu
    from megatron_ext.patching import gates

    patches = [*cpu.patches(), cpu.compile_helpers_patch()]

    def places():
        found = {}
        for patch in patches:
            owner, name, raw = gates.locate(patch)
            found[patch.name] = (raw, name in vars(owner))
        return found

    before, state = places(), global_state()
    backend, registry = activated()
    during = places()
    changed_state = global_state() != state
    backend.activate(registry)  # once more changes nothing
    backend.deactivate(registry)
    registry.revert()
    after = places()
    same = [name for name, (raw, _) in before.items() if during[name][0] is raw]
    different = [name for name, (raw, own) in before.items() if after[name] != (raw, own)]
    return same, different, changed_state, global_state() == state, len(patches)


def test_deactivation_restores_every_attribute_by_identity():
    ((same, different, changed_state, restored_state, count),) = run_ranks(activate_and_deactivate, 1)
    assert count > 40
    assert same == []
    assert different == []
    assert changed_state and restored_state


def test_activation_says_so_in_one_line_on_the_first_rank_only():
    exits = run_successful_ranks(say_so, 2, timeout=60)
    assert exits[0].stdout == "> megatron_ext: no CUDA device was found, training runs on CPU with gloo\n"
    assert exits[1].stdout == ""


def test_every_node_says_that_it_has_no_gpu():
    exits = run_successful_ranks(say_so_on_a_node_of_its_own, 2, timeout=60)
    assert exits[1].stdout == "> megatron_ext: rank 1: no CUDA device was found, training runs on CPU with gloo\n"


def say_so_on_a_node_of_its_own():
    import os

    os.environ["LOCAL_RANK"] = "0"
    activated()


def say_so():
    activated()


def tensors_asked_for_on_cuda():
    """Return the device type of tensors that were asked for on CUDA in every way Megatron does it."""
    import torch

    activated()
    here = torch.cuda.current_device()
    plain = torch.ones(2)
    made = [
        torch.tensor([1.0], device="cuda"),
        torch.zeros(2, device="cuda:0"),
        torch.ones(2, device=torch.device("cuda")),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.rand(2, device=0),
        torch.full((2,), 3, device=f"cuda:{here}"),
        torch.arange(3, device=here),
        torch.zeros_like(plain, device="cuda"),
        plain.cuda(),
        plain.cuda(non_blocking=True),
        plain.to("cuda"),
        plain.to(torch.device("cuda", 0), torch.float64),
        plain.to(device="cuda:0", dtype=torch.float64),
        torch.nn.Linear(2, 2).cuda(here).weight,
        torch.nn.Linear(2, 2).to("cuda").weight,
    ]
    kinds = [torch.zeros(2, device="meta"), plain.to("meta")]
    with torch.device("meta"):
        kinds += [torch.zeros(2), torch.empty(2)]
    converted = plain.to(torch.float64), plain.to(made[11])
    return (
        [tensor.device.type for tensor in made],
        [tensor.device.type for tensor in kinds],
        [str(tensor.dtype) for tensor in converted],
        plain.cuda() is plain,
    )


def test_cuda_in_any_spelling_means_the_cpu_and_other_devices_are_left_alone():
    ((made, meta, dtypes, same),) = run_ranks(tensors_asked_for_on_cuda, 1)
    assert made == ["cpu"] * 15
    assert meta == ["meta"] * 4
    assert dtypes == ["torch.float64"] * 2
    assert same


def type_names():
    import torch

    activated()
    namespace = {"__name__": "megatron.core.optimizer.example", "tensor": torch.ones(1, dtype=torch.bfloat16)}
    exec(
        "seen = tensor.type()\nconverted = tensor.type(name)",
        namespace | {"name": "torch.FloatTensor"},
        namespace,
    )
    return namespace["seen"], torch.ones(1).type(), str(namespace["converted"].dtype)


def test_only_megatron_sees_the_type_names_of_cuda():
    ((inside, outside, converted),) = run_ranks(type_names, 1)
    assert inside == "torch.cuda.BFloat16Tensor"
    assert outside == "torch.FloatTensor"
    assert converted == "torch.float32"


def device_calls():
    import torch

    activated()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start = stream.record_event()
        torch.ones(4).record_stream(stream)
    end = torch.cuda.Event(enable_timing=True)
    sum(range(200_000))
    end.record()
    return (
        start.elapsed_time(end),
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_stats()["allocated_bytes.all.current"],
    )


def test_events_measure_time_and_memory_is_the_process():
    ((milliseconds, available, count, now, peak, stat),) = run_ranks(device_calls, 1)
    assert 0 < milliseconds < 10_000
    assert not available and count == 1
    assert 100e6 < now <= peak * 1.1
    assert stat > 100e6


def compile_with_a_backend_that_fails():
    """Call functions that were decorated before and after activation."""
    import torch

    def fail(*args):
        raise RuntimeError("compiled")

    early = torch.compile(lambda value: value + 1, backend=fail)
    backend, registry = activated()
    late = torch.compile(lambda value: value + 2, backend=fail)
    decorated = torch.compile(backend=fail)(lambda value: value + 3)
    module = torch.compile(torch.nn.Linear(1, 1), backend=fail)
    eager = [float(function(torch.ones(()))) for function in (early, late, decorated)]
    eager.append(module(torch.ones(1)).numel())
    assert list(module.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    backend.deactivate(registry)
    try:
        early(torch.ones(()))
    except Exception as error:  # torch wraps what the backend raised in a class of its own
        return eager, "compiled" in str(error)
    return eager, False


def test_nothing_is_compiled_while_active_whenever_it_was_decorated():
    ((eager, compiles_again),) = run_ranks(compile_with_a_backend_that_fails, 1)
    assert eager == [2.0, 3.0, 4.0, 1]
    assert compiles_again


def loader_and_device_streams():
    """Draw from the device's generator around data loaders whose dataset draws random numbers itself."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noise(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(())

    activated()

    def draws(with_loader):
        torch.manual_seed(7)
        noise, device = [], [float(torch.rand(()))]
        if with_loader:
            for _ in range(2):
                noise += [float(value) for value in DataLoader(Noise(), shuffle=True, pin_memory=True)]
                device.append(float(torch.rand(())))
        else:
            device += [float(torch.rand(())) for _ in range(2)]
        return noise, device

    return draws(True), draws(True), draws(False)


def test_data_loaders_never_move_the_generator_of_dropout():
    ((first, second, without),) = run_ranks(loader_and_device_streams, 1)
    assert first == second  # reproducible from the seed
    noise, device = first
    assert len(set(noise)) == 8  # and a stream of its own, not the same numbers over and over
    assert device == without[1]


def tensor_parallel_draws():
    """Return dropout masks drawn outside and inside the tracker, with a loader on one rank only."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.utils.data import DataLoader

    activated()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    replicated, split = [], []
    for _ in range(3):
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            list(DataLoader(list(range(4)), shuffle=True))
        replicated.append(torch.nn.functional.dropout(torch.ones(64)).tolist())
        with tracker.fork():
            split.append(torch.nn.functional.dropout(torch.ones(64)).tolist())
            state = torch.cuda.get_rng_state()
            torch.rand(1)
            torch.cuda.set_rng_state(state)
    saved = tracker.get_states()
    with tracker.fork():
        ahead = torch.rand(4).tolist()
    tracker.set_states(saved)
    with tracker.fork():
        again = torch.rand(4).tolist()
    return replicated, split, ahead == again


def test_dropout_is_equal_where_activations_are_replicated_and_differs_where_they_are_split():
    exits = run_successful_ranks(tensor_parallel_draws, 2, timeout=60)
    (replicated, split, restored), (other_replicated, other_split, other_restored) = [e.value for e in exits]
    assert replicated == other_replicated
    assert all(mine != theirs for mine, theirs in zip(split, other_split, strict=True))
    assert all(mine != theirs for mine, theirs in zip(replicated, split, strict=True))
    assert len({tuple(mask) for mask in replicated + split}) == 6  # both streams move on
    assert restored and other_restored
    # Megatron warns when the CPU's generator moves inside the tracker, which here it must.
    assert "RNG state changed" not in exits[0].stdout + exits[0].stderr


def helpers(folder):
    """Return whether the patched function compiles: in a wheel, beside a Makefile, without the library."""
    import megatron.core.datasets

    from megatron_ext.backends.cpu import compile_helpers_patch

    calls = []
    compile_helpers = compile_helpers_patch().wrap(lambda: calls.append("make"))

    def compiles():
        calls.clear()
        compile_helpers()
        return bool(calls)

    in_wheel = compiles()
    megatron.core.datasets.__path__.append(folder)
    beside_makefile = compiles()
    megatron.core.datasets.__path__.remove(folder)
    sys.modules["megatron.core.datasets.helpers_cpp"] = None
    return in_wheel, beside_makefile, compiles()


def test_helpers_are_compiled_unless_they_are_shipped_without_a_makefile(tmp_path):
    (tmp_path / "Makefile").touch()
    assert run_ranks(helpers, 1, os.fspath(tmp_path)) == [(False, True, True)]


def start_checkpoint_queue(folder):
    """Start the queue of a script that leaves a mark when it is imported; return what went through, and the mark."""
    import types
    from pathlib import Path

    activated()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    mark = Path(folder) / "imported"
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__ = os.fspath(Path(folder) / "script.py")
    Path(script.__file__).write_text(f"open({os.fspath(mark)!r}, 'w')")
    filesystem_async._results_queue = None  # the test's ranks start with one
    queue = filesystem_async.get_write_results_queue()
    queue.put("result")
    return queue.get_nowait(), mark.exists(), sys.modules["__main__"] is script


def test_the_queue_of_checkpoint_writers_starts_without_importing_the_script(tmp_path):
    assert run_ranks(start_checkpoint_queue, 1, os.fspath(tmp_path)) == [("result", False, True)]


@pytest.mark.gpu
def test_a_run_on_gpu_gets_none_of_the_backend_but_the_helpers():
    ((names, available),) = run_ranks(patch_on_gpu, 1)
    assert available
    assert [name for name in names if name.startswith("cpu/")] == []
    assert "wheel/compile-helpers" in names


def patch_on_gpu():
    import torch

    from megatron_ext import patch_megatron
    from megatron_ext.activation import registry

    patch_megatron()
    return [patch.name for patch in registry().applied], torch.cuda.is_available()
