# SPDX-License-Identifier: Apache-2.0
"""The optimizer whose steps are followed by rounds."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.plain_torch.averager import OuterOptimPeriodicModelAverager
from megatron_ext.local_sgd.plain_torch.schedulers import SchedulesInStep
from megatron_ext.local_sgd.reporting.round_report import RoundReport
from megatron_ext.params.moments import reset_non_finite_moments

__all__ = ["StatefulPostLocalSGDOptimizer"]


class StatefulPostLocalSGDOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are followed by outer rounds, and whose state includes theirs.

    With `torch.amp.GradScaler` a step that one worker skips counts there, too, so that workers stay in step.
    """

    # GradScaler then calls `step` in any case, and says in two attributes what it knows of the gradients.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

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
        # Not torch's own initialisation: most of what it would keep is the inner optimizer's.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults
        # Hooks of a step run around the outer round, too; those of a state see the inner optimizer's.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        for hooks in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{hooks}_hooks"
            setattr(self, name, getattr(optim, name))
        self.last_round: RoundReport | None = None
        names = {} if model is None else {id(value): name for name, value in model.named_parameters()}
        parameters = [value for group in optim.param_groups for value in group["params"]]
        named = ((names.get(id(value), f"parameter{index}"), value) for index, value in enumerate(parameters))
        self._schedules = SchedulesInStep(optim, averager.process_group, averager.shard_group, averager.say)
        if averager.keeps_in_step:
            averager.when_met = self._schedules.meet
        averager.when_healed = lambda: reset_non_finite_moments(self.optim)
        averager.attach(named, model, optim)

    def align_schedulers(self, *schedulers: Any) -> None:
        """Keep learning-rate schedulers of all workers at the same place; all ranks must call it, with the same ones.

        A loop that steps its scheduler only after steps that `GradScaler` did not skip leaves a worker behind on which
        one was. Wherever workers meet, schedulers that are behind make the steps that they lack, and a line says so.
        Without this call a difference of the learning rates is said once, and stays.

        Args:
            schedulers: torch's, or what has `last_epoch` and a `step()` without arguments.

        Raises:
            UserError: a scheduler cannot be compared by its count, the workers' differ, or the method is one in which
                workers make different numbers of steps by design; on all ranks.
        """
        if self.averager.config.use_async:
            raise UserError(
                "align_schedulers has no place with use_async, where every worker makes a number of steps of its own"
            )
        self._schedules.take(schedulers)
        self.averager.when_met = self._schedules.meet

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
        _refuse_torchs_checkpoint_api()
        self.averager.before_step()
        given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {} if closure is None else {"closure": closure})
        for before in self._optimizer_step_pre_hooks.values():
            given = before(self, *given) or given
        loss = self._step(*given[0], **given[1])
        for after in self._optimizer_step_post_hooks.values():
            after(self, *given)
        return loss

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        if hasattr(self, "found_inf"):
            loss = self._step_scaled()
        else:
            loss = self.optim.step(closure) if closure is not None else self.optim.step()
        self.last_round = self.averager.average_parameters() or self.last_round
        return loss

    def _step_scaled(self) -> float | None:
        """Make the inner step for GradScaler, or none where a gradient is non-finite."""
        if float(self.found_inf):
            return None
        if self.grad_scale is not None:  # they are not unscaled yet
            inverse = self.grad_scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return self.optim.step()

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
        _refuse_torchs_checkpoint_api()
        return {**self.optim.state_dict(), "local_sgd": self.averager.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank, after the model's parameters were loaded.

        Raises:
            UserError: local SGD's part is missing or does not fit; nothing was taken over.
        """
        _refuse_torchs_checkpoint_api()
        inner = {key: value for key, value in state_dict.items() if key != "local_sgd"}
        if "local_sgd" not in state_dict:
            raise UserError(
                "the optimizer's state has none of local SGD's, like that of a run without it; load it into the inner "
                "optimizer before it is wrapped, and load_local_sgd_state_dict if that was saved"
            )
        self.averager.load_state_dict(state_dict["local_sgd"])
        self.optim.load_state_dict(inner)


def _refuse_torchs_checkpoint_api() -> None:
    """Refuse `get_optimizer_state_dict` and its like as the caller of this function's caller.

    They keep what an optimizer has by parameter and by group, so local SGD's part would be lost without a word; and
    where an optimizer has no state yet, they make a step, which would count.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        raise UserError(
            "torch's distributed checkpoint API leaves local SGD's state out; give it the inner optimizer "
            "(optimizer.optim), and use save_local_sgd_state_dict and load_local_sgd_state_dict for the rest"
        )
