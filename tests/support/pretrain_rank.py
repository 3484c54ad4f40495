# SPDX-License-Identifier: Apache-2.0
"""The side of `run_pretrain` that lives in a rank process: patch, run the script, record what it computed."""

import functools
import hashlib
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PatchMode = Literal["script", "module", "backend-only"]
Before = Callable[[], object]
Probe = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What `train_step` returned."""

    iteration: int
    """Counted from 1, as in the log."""
    losses: dict[str, float]
    """Reduced losses by name at full precision; empty on pipeline stages before the last."""
    grad_norm: float | None
    skipped: bool


@dataclass(kw_only=True)
class TrainRecord:
    """What one rank computed."""

    steps: list[TrainStep] = field(default_factory=list)
    parameters: list[dict[str, str]] = field(default_factory=list)
    optimizer: list[list[str]] = field(default_factory=list)
    probe: Any = None


def pretrain_rank(
    script: str, arguments: tuple[str, ...], patch: PatchMode, probe: Probe | None, before: tuple[Before, ...]
) -> TrainRecord:
    """Run the script with the given command line in this process."""
    record = TrainRecord()
    for instrument in before:
        instrument()
    _record_training(record, probe)
    if "--save" in arguments:
        _start_writer_queue()
    sys.path[0:0] = [str(Path(script).parent)]  # the interpreter does so for a script it starts
    sys.argv = [script, *arguments]
    try:
        _run_script(script, arguments, patch)
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0):
            raise
    return record


def _run_script(script: str, arguments: tuple[str, ...], patch: PatchMode) -> None:
    if patch == "module":
        from megatron_ext.__main__ import main

        main([script, *arguments])
        return
    if patch == "backend-only":
        _activate_backend_only()
    runpy.run_path(script, run_name="__main__")


def _start_writer_queue() -> None:
    """Start the process of Megatron's checkpoint queue now and by forking.

    Megatron would spawn it at the first save, and a spawned process imports torch and Megatron again. It would outlive
    a rank that is killed, and keep the output open that the rank writes to.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from megatron_ext.async_save.seam import ending_with_its_rank

    ending_with_its_rank(get_write_results_queue)(mp_mode="fork")


def _activate_backend_only() -> None:
    import megatron_ext
    from megatron_ext.backends.cpu import CpuBackend, available_device_is_cuda, megatron_gaps
    from megatron_ext.patching import PatchRegistry

    registry = PatchRegistry()
    if available_device_is_cuda():
        registry.apply([megatron_gaps.compile_helpers_patch()])
    else:
        CpuBackend().activate(registry)
    megatron_ext.patch_megatron = lambda *_args, **_kwargs: None


def _record_training(record: TrainRecord, probe: Probe | None) -> None:
    """Wrap the training functions once the model is built: whatever patches there are then lie inside."""
    from megatron.training import training

    build = training.setup_model_and_optimizer

    @functools.wraps(build)
    def build_and_wrap(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        training.train = _recorded_train(training.train, record, probe)
        training.train_step = _recorded_train_step(training.train_step, record)
        return built

    training.setup_model_and_optimizer = build_and_wrap


def _recorded_train(
    train: Callable[..., Any], record: TrainRecord, probe: Probe | None
) -> Callable[..., Any]:
    def observe(model: Any, optimizer: Any) -> None:
        from megatron.training import get_args

        record.parameters = parameter_digests(model)
        record.optimizer = optimizer_digests(optimizer)
        record.probe = None if probe is None else probe(model, optimizer, get_args())

    @functools.wraps(train)
    def recorded(forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = train(forward_step_func, model, optimizer, *args, **kwargs)
        except SystemExit as exit_request:  # --exit-interval and its like leave so
            if not exit_request.code:
                observe(model, optimizer)
            raise
        observe(model, optimizer)
        return result

    return recorded


def _recorded_train_step(train_step: Callable[..., Any], record: TrainRecord) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        result = train_step(*args, **kwargs)
        losses, skipped, _checkpoint, _exit, _exit_code, grad_norm, *_rest = result
        record.steps.append(
            TrainStep(
                iteration=get_args().curr_iteration + 1,
                losses={name: float(loss) for name, loss in losses.items()},
                grad_norm=None if grad_norm is None else float(grad_norm),
                skipped=bool(skipped),
            )
        )
        return result

    return recorded


def parameter_digests(model: Any) -> list[dict[str, str]]:
    """Return the MD5 of each parameter by name, for each model chunk."""
    return [{name: digest(value) for name, value in chunk.named_parameters()} for chunk in model]


def optimizer_digests(optimizer: Any) -> list[list[str]]:
    """Return the MD5 of each authoritative parameter, for each chained optimizer."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    return [[digest(value) for value in member.get_parameters()] for member in members]


def digest(tensor: Any) -> str:
    """Return the MD5 of the shape, dtype and bytes of a tensor, or of this rank's part of a DTensor."""
    import torch
    from torch.distributed.tensor import DTensor

    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.md5(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + content).hexdigest()


def shift_sampler(worker: int, workers: int) -> None:
    """Make Megatron's samplers in this process take one worker's samples, also after a resume."""
    from megatron.training.datasets import data_samplers

    for name in ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler"):
        setattr(data_samplers, name, _shifted(getattr(data_samplers, name), worker, workers))


def _shifted(sampler: Callable[..., Any], worker: int, workers: int) -> Callable[..., Any]:
    @functools.wraps(sampler)
    def shifted(
        *dataset: Any, data_parallel_rank: int, data_parallel_size: int, consumed_samples: int, **others: Any
    ) -> Any:
        return sampler(
            *dataset,
            data_parallel_rank=data_parallel_rank + worker * data_parallel_size,
            data_parallel_size=data_parallel_size * workers,
            consumed_samples=consumed_samples * workers,
            **others,
        )

    return shifted
