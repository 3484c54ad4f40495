# SPDX-License-Identifier: Apache-2.0
"""Local SGD without Megatron: for modules under DistributedDataParallel and under FSDP2's `fully_shard`.

The names are those of atorch's README. The wrapped optimizer makes the inner step, then the averager counts it and runs
an outer round when one is due. Whatever synchronises gradients must stay inside a worker: with DDP, torch's
`post_localSGD_hook` with `start_localSGD_iter` = our warm-up; with FSDP2, a mesh of the worker's own ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError, combine
from megatron_ext.local_sgd.config import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.engine import LocalSGD, SyncedTensor
from megatron_ext.local_sgd.outer_optimizer import outer_optimizer_problems
from megatron_ext.local_sgd.report import RoundReport
from megatron_ext.local_sgd.streaming import StreamingConfig

__all__ = [
    "OuterOptimPeriodicModelAverager",
    "StatefulPostLocalSGDOptimizer",
    "load_local_sgd_state_dict",
    "save_local_sgd_state_dict",
]

# The first number in a parameter's name is that of its layer.
_LAYER = re.compile(r"^(.*?\.)?\d+(?=\.)")


class OuterOptimPeriodicModelAverager:
    """Runs outer rounds over the workers' parameters, every so many steps."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        local_sgd_config: LocalSGDConfig,
        outer_optim_config: OuterOptimizerConfig | None = None,
        gta_config: GTAConfig | None = None,
        streaming_config: StreamingConfig | None = None,
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Check the configuration.

        Args:
            process_group: one rank per worker, in worker order: those that hold the same parameters, or the same
                shard of them. All ranks when None.
            local_sgd_config: schedule and penalty; `use_local_sgd` and `local_sgd_workers` are set from the group.
            outer_optim_config: the outer optimizer; DiLoCo's when None.
            gta_config: how pseudo-gradients become one; their mean when None.
            streaming_config: fragments, and how rounds overlap with training; the whole model at once when None.
            shard_group: all ranks of this worker, when its parameters are sharded over several.

        Raises:
            UserError: a value is bad.
        """
        self._across = process_group or dist.group.WORLD
        self._inside = shard_group
        workers = dist.get_world_size(self._across)
        self.config = dataclasses.replace(local_sgd_config, use_local_sgd=True, local_sgd_workers=workers)
        self.outer = outer_optim_config or OuterOptimizerConfig()
        self.gta = gta_config or GTAConfig()
        self.streaming = streaming_config or StreamingConfig()
        problems = self.config.problems() + outer_optimizer_problems(self.outer) + self.gta.problems(self.config)
        problems += self.streaming.problems(self.config, self.outer)
        if problems:
            raise combine(problems, "local SGD")
        self._engine: LocalSGD | None = None
        self.step = 0

    @property
    def engine(self) -> LocalSGD:
        """The engine.

        Raises:
            UserError: `attach` was not called.
        """
        if self._engine is None:
            raise UserError(
                "the averager knows no parameters; wrap the optimizer in StatefulPostLocalSGDOptimizer, or call "
                "attach(), before the first step"
            )
        return self._engine

    @torch.no_grad()
    def attach(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the parameters to average; without warm-up their present values are the anchor.

        Args:
            named_parameters: fp32, of the same names and shapes on all workers, and equal there. DTensors stand for
                their local shards.

        Raises:
            UserError: a parameter is not fp32.
            RuntimeError: the workers' values differ.
        """
        synced = []
        for name, parameter in named_parameters:
            if parameter.dtype != torch.float32:
                raise UserError(
                    f"parameter {name} is {parameter.dtype}; local SGD averages fp32 parameters: keep them in fp32 and "
                    "compute in another type (torch.autocast, FSDP2's MixedPrecisionPolicy)"
                )
            synced.append(SyncedTensor(tensor=_local(parameter), name=name, unit=unit_of(name)))
        self._engine = LocalSGD(
            synced,
            units=list(dict.fromkeys(entry.unit for entry in synced)),
            config=self.config,
            outer=self.outer,
            gta=self.gta,
            across=self._across,
            inside=self._inside,
            streaming=self.streaming,
        )
        if self.config.local_sgd_warmup_steps == 0:
            self._engine.take_anchor()

    @torch.no_grad()
    def average_parameters(self, params: object = None) -> RoundReport | None:
        """Count one inner step, and do what is due of rounds; all ranks call it after each of their steps.

        Args:
            params: ignored; torch's averagers take it.

        Returns:
            The report of the last round whose outer step was made, if there was one.
        """
        engine = self.engine
        self.step += 1
        if self.step == self.config.local_sgd_warmup_steps:
            engine.take_anchor()
        elif self.step > self.config.local_sgd_warmup_steps and engine.count_step():
            reports = engine.advance().reports
            return reports[-1] if reports else None
        return None

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make all workers equal by a round of the whole model now, as at the end of training; all ranks call it."""
        if not self.engine.synced:
            self.engine.sync()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; all ranks must call it, because anchor and outer state are sharded over workers."""
        engine = self.engine
        return {
            "step": self.step,
            "common": engine.tensor_state(),
            "own": engine.worker_state(),
            "scalars": engine.scalar_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank; the parameters must be those of that time."""
        self.engine.load(state["common"], state["scalars"], state["own"])
        self.step = int(state["step"])


class StatefulPostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are followed by outer rounds, and whose state includes theirs."""

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        averager: OuterOptimPeriodicModelAverager,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optim: the inner optimizer.
            averager: runs the rounds.
            model: gives the parameters their names, by which layers become units of the penalty. Without it every
                parameter is a unit.
        """
        # Not torch's own initialisation: everything it would keep is the inner optimizer's.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults
        self.last_round: RoundReport | None = None
        names = {} if model is None else {id(value): name for name, value in model.named_parameters()}
        parameters = [value for group in optim.param_groups for value in group["params"]]
        averager.attach((names.get(id(value), f"parameter{index}"), value) for index, value in enumerate(parameters))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        """The inner optimizer's own groups, also after a state was loaded."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute there
        """The inner optimizer's own state."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Make the inner step, then the outer round if it is due; `last_round` has its report."""
        loss = self.optim.step(closure) if closure is not None else self.optim.step()
        self.last_round = self.averager.average_parameters() or self.last_round
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the workers agreed on a set of parameters.

        Raises:
            UserError: always.
        """
        raise UserError("parameters cannot be added once local SGD has started; add them to the inner optimizer before")

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and local SGD's, of this rank; all ranks must call it."""
        return {**self.optim.state_dict(), "local_sgd": self.averager.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank, after the model's parameters were loaded."""
        inner = {key: value for key, value in state_dict.items() if key != "local_sgd"}
        self.optim.load_state_dict(inner)
        self.averager.load_state_dict(state_dict["local_sgd"])


def save_local_sgd_state_dict(
    optimizer: StatefulPostLocalSGDOptimizer, save_dir: str | Path, ckpt_name: str = "local_sgd_ckpt"
) -> Path:
    """Write local SGD's state, a file per rank, and return this rank's; all ranks must call it.

    Args:
        optimizer: whose averager is saved.
        save_dir: folder, made when it does not exist.
        ckpt_name: beginning of the files' names.
    """
    state = optimizer.averager.state_dict()
    file = _file(save_dir, ckpt_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(file)
    return file


def load_local_sgd_state_dict(
    optimizer: StatefulPostLocalSGDOptimizer, load_dir: str | Path, ckpt_name: str = "local_sgd_ckpt"
) -> None:
    """Take over what `save_local_sgd_state_dict` wrote; all ranks must call it, after the parameters were loaded.

    Raises:
        UserError: this rank's file does not exist.
    """
    file = _file(load_dir, ckpt_name)
    if not file.is_file():
        raise UserError(f"{file}: no such file; local SGD's state is loaded on as many ranks as saved it")
    optimizer.averager.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def unit_of(name: str) -> str:
    """Return the unit of a parameter: its layer, which the first number in its name tells, else its module."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name.rpartition(".")[0] or name


def _file(folder: str | Path, name: str) -> Path:
    return Path(folder) / f"{name}_rank{dist.get_rank()}.pt"


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter on this rank."""
    from torch.distributed.tensor import DTensor

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()
