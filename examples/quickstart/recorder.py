# SPDX-License-Identifier: Apache-2.0
"""The quickstart's instrument inside a rank: losses, iteration times, traffic between workers, digests.

It only reads. What it attaches lies outside of whatever else is patched, so that a stock run and a run with
local SGD are measured in exactly the same way.
"""

import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import megatron_ext
from megatron_ext.activation import registry
from megatron_ext.patching import Patch, PatchRegistry
from megatron_ext.transport.traffic import TrafficMeter

TRAINING = "megatron.training.training"


@dataclass(kw_only=True)
class Record:
    """What one rank saw."""

    rank: int = 0
    """Global rank."""

    worker: int = 0
    """The worker that the rank belongs to, in a synchronous run the one that it would belong to."""

    first_iteration: int = 0
    """Iterations that were finished when this run started: not 0 after a resume."""

    losses: list[float | None] = field(default_factory=list)
    """Loss of every iteration as `train_step` returned it, at full precision: the mean over the global batch
    in a stock run, over the worker's part of it with local SGD. None on pipeline stages before the last."""

    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(iterations finished, validation loss) of every evaluation."""

    segments: list[list[float]] = field(default_factory=list)
    """Seconds of every iteration, a list for each stretch between interruptions (evaluation, checkpoint)."""

    crossing_bytes: list[int] = field(default_factory=list)
    """Bytes that this rank gave to collectives with other workers, for every iteration."""

    crossing_calls: list[int] = field(default_factory=list)
    """Calls of such collectives, for every iteration."""

    parameters: int = 0
    """Number of this rank's parameters."""

    weights_digest: str = ""
    """SHA-256 over the model's parameters at the end of training."""

    optimizer_digest: str = ""
    """SHA-256 over the inner optimizer's fp32 parameters and their states at the end of training."""

    patches: list[str] = field(default_factory=list)
    """Names of megatron_ext's patches that were in force, the instrument's own left out."""

    versions: dict[str, str] = field(default_factory=dict)
    """Versions by package, and the device."""


class Recorder:
    """Attaches to Megatron's training loop and keeps a `Record`."""

    def __init__(self, *, workers: int) -> None:
        """Prepare for the process that torchrun started.

        Args:
            workers: number of equal, contiguous slices of the ranks between which traffic is counted.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Contiguous ranks are a worker as long as there is no pipeline parallelism.
        worker_of = [other * workers // world_size for other in range(world_size)]
        self.record = Record(rank=rank, worker=worker_of[rank])
        self._meter = TrafficMeter(worker_of=worker_of)
        self._patches = PatchRegistry()
        self._losses: list[torch.Tensor | None] = []
        self._evaluations: list[tuple[int, torch.Tensor]] = []
        self._iteration_start: tuple[float, int, int] | None = None
        self._interrupted = True

    def attach(self) -> None:
        """Start to count collectives, and to watch the training loop once it is about to run."""
        self._patches.apply([*self._meter.patches(), _patch("setup_model_and_optimizer", self._wrap_set_up)])

    def write(self, folder: Path) -> None:
        """Write the record of this rank as `rank<N>.json`."""
        record = self.record
        record.losses = [None if loss is None else float(loss) for loss in self._losses]
        record.evaluations = [(iteration, float(loss)) for iteration, loss in self._evaluations]
        record.patches = [patch.name for patch in registry().applied]
        record.versions = _versions()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{record.rank}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")

    # The wrappers.

    def _wrap_set_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # Only now, so that everything that was patched meanwhile lies inside.
            self._patches.apply(
                [
                    _patch("train", self._wrap_train),
                    _patch("train_step", self._wrap_step),
                    _patch("evaluate", self._wrap_evaluate),
                    _patch("save_checkpoint_and_time", self._wrap_save),
                ]
            )
            return result

        return setup_model_and_optimizer

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            self.record.first_iteration = get_args().iteration
            result = original(forward_step, model, optimizer, *args, **kwargs)
            self._interrupt()
            self.record.parameters = sum(value.numel() for chunk in model for value in chunk.parameters())
            self.record.weights_digest = _digest(_weights(model))
            self.record.optimizer_digest = _digest(_optimizer_state(optimizer))
            return result

        return train

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._end_iteration()
            if self._interrupted:
                self.record.segments.append([])
                self._interrupted = False
            meter = self._meter
            self._iteration_start = (time.perf_counter(), meter.crossing_bytes, meter.crossing_calls)
            result = original(*args, **kwargs)
            # Kept as a tensor: reading its value would make a GPU wait.
            self._losses.append(result[0].get("lm loss"))
            return result

        return train_step

    def _wrap_evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._interrupt()
            result = original(*args, **kwargs)
            if "lm loss" in result[0]:
                finished = self.record.first_iteration + len(self._losses)
                self._evaluations.append((finished, result[0]["lm loss"]))
            return result

        return evaluate

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
            self._interrupt()
            return original(*args, **kwargs)

        return save_checkpoint_and_time

    # An iteration lasts from its `train_step` to the next one or to an interruption, so that what is done
    # between them (a log line, for instance) is part of it.

    def _end_iteration(self) -> None:
        if self._iteration_start is None:
            return
        start, bytes_before, calls_before = self._iteration_start
        self._iteration_start = None
        self.record.segments[-1].append(time.perf_counter() - start)
        self.record.crossing_bytes.append(self._meter.crossing_bytes - bytes_before)
        self.record.crossing_calls.append(self._meter.crossing_calls - calls_before)

    def _interrupt(self) -> None:
        if not self._interrupted and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._end_iteration()
        self._interrupted = True


def _patch(function: str, wrap: Callable[[Any], Any]) -> Patch:
    return Patch(
        name=f"quickstart/{function}",
        target=f"{TRAINING}:{function}",
        wrap=wrap,
        reason="record what the training loop computes, and when",
    )


def _weights(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(model):
        for name, value in chunk.named_parameters():
            yield f"{index}.{name}", value


def _optimizer_state(optimizer: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the fp32 parameters of a Megatron optimizer and their states, in their fixed order."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        for number, value in enumerate(value for group in inner.param_groups for value in group["params"]):
            yield f"{number}", value
            for name, state in sorted(inner.state[value].items()):
                if isinstance(state, torch.Tensor):
                    yield f"{number}.{name}", state


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 over names, shapes, types and bytes."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _versions() -> dict[str, str]:
    on_gpu = torch.distributed.get_backend() == "nccl"
    return {
        "megatron_ext": megatron_ext.__version__,
        "megatron-core": metadata.version("megatron-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})",
    }
