# SPDX-License-Identifier: Apache-2.0
"""Configuration of the outer optimizer: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import argparse
import dataclasses
import importlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext.config_options import ANY_TYPE, FromArgs, flag, on_off
from megatron_ext.errors import UserError
from megatron_ext.outer.optimizers.all_optimizers import find_optimizer
from megatron_ext.outer.round_points import Points, parse, range_problem, text_problems, value_at

if TYPE_CHECKING:
    import torch

    from megatron_ext.outer.optimizers.base import OuterOptimizer

    OptimizerClass = type[torch.optim.Optimizer] | str
    Arguments = dict[str, Any]
else:  # what Megatron's argument factory can make an argument of
    OptimizerClass, Arguments = str, dict

__all__ = ["OuterOptimizerConfig"]


# Far above any use: beyond it the first outer step alone may leave the range of fp32, unseen before the next round.
_LARGEST_RATE = 1e3


def _json_object(text: str) -> dict[str, Any]:
    """Return what an argument says in JSON.

    Raises:
        argparse.ArgumentTypeError: it is not an object.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); give an object such as {_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; give one such as {_EXAMPLE}")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _is_rate(value: Any) -> bool:
    """Return whether a value is a learning rate; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST_RATE


def _is_momentum(value: float) -> bool:
    return 0 <= value < 1


_SCHEDULES = {"lr": "outer_optimizer_lr_schedule", "momentum": "outer_optimizer_momentum_schedule"}
"""Of the options of an outer optimizer that may change, the fields that say how."""

_ALLOWED = {"lr": (_is_rate, f"be above 0 and at most {_LARGEST_RATE:g}"), "momentum": (_is_momentum, "be in [0, 1)")}

_EXAMPLE = """'{"lr": 0.7, "momentum": 0.9}'"""


@dataclass(frozen=True, kw_only=True)
class OuterOptimizerConfig(FromArgs):
    """The optimizer that applies the workers' averaged pseudo-gradient (DiLoCo, arXiv 2311.08105)."""

    outer_optimizer: str = "sgd"
    """Outer optimizer: 'sgd', 'adam', 'adamw', 'none' (plain averaging of the weights), that of a package by its name,
    or the import path of a torch optimizer class, such as mypackage.optimizers.Lion."""

    outer_optimizer_lr: float | None = flag("--outer-optimizer-lr", None, type=float)
    """Outer learning rate: 0.7 for sgd unless given; all others need one of their own, since theirs mean something
    else (adam moves every weight by about the learning rate)."""

    outer_optimizer_momentum: float = 0.9
    """Momentum of the outer sgd."""

    outer_optimizer_nesterov: bool = on_off("--outer-optimizer-nesterov", True)
    """Nesterov momentum in the outer sgd; no effect when the momentum is 0."""

    outer_optimizer_lr_schedule: str | None = None
    """Outer learning rate by rounds, in place of --outer-optimizer-lr: pairs ROUND:VALUE, such as
    1:0.1,10:0.7,90:0.7,100:0.1 for a warm-up and a decay. It goes from one to the next in a straight line, and stays at
    the last. Rounds are counted from 1, after warm-up iterations, and with fragments by the intervals (Pier, arXiv
    2511.17849)."""

    outer_optimizer_momentum_schedule: str | None = None
    """Momentum of the outer sgd by rounds, in place of --outer-optimizer-momentum, in the same form."""

    outer_optim_class: OptimizerClass | None = field(default=None, metadata={ANY_TYPE: True})
    """In place of all of the above: a torch optimizer class (in Python) or its import path."""

    outer_optim_kwargs: Arguments = field(
        default_factory=dict, metadata={"argparse_meta": {"type": _json_object, "metavar": "JSON"}}
    )
    """Arguments of --outer-optim-class, all that it gets: a JSON object."""

    def problems(self) -> list[str]:
        """Return the problems of the values by themselves, one sentence each."""
        if self.outer_optim_class is not None or self.outer_optim_kwargs:
            return self._class_problems()
        found, rate = [], self.outer_optimizer_lr
        if rate is not None and not 0 < rate <= _LARGEST_RATE:
            found.append(f"--outer-optimizer-lr is {rate}; it must be a number above 0 and at most {_LARGEST_RATE:g}")
        if not 0 <= self.outer_optimizer_momentum < 1:
            found.append(f"--outer-optimizer-momentum is {self.outer_optimizer_momentum}; it must be in [0, 1)")
        try:
            kind = self.kind
        except UserError as error:
            return [*found, str(error)]  # what an optimizer that there is not would need is of no interest
        has_rate = rate is not None or self.outer_optimizer_lr_schedule is not None
        if not has_rate and "lr" in kind.options and kind.default_lr is None:
            found.append(
                f"--outer-optimizer {self.name} needs --outer-optimizer-lr; the default of 0.7 is for sgd only"
            )
        found += self._schedule_problems(kind)
        for option, flag_name, is_given in (
            ("lr", "--outer-optimizer-lr", rate is not None),
            (
                "momentum",
                "--outer-optimizer-momentum",
                self.outer_optimizer_momentum != type(self).outer_optimizer_momentum,
            ),
            ("nesterov", "--no-outer-optimizer-nesterov", not self.outer_optimizer_nesterov),
        ):
            if is_given and option not in kind.options:
                found.append(f"{flag_name} has no effect with --outer-optimizer {self.name}; drop it")
        return found

    def _schedule_problems(self, kind: "type[OuterOptimizer]") -> list[str]:
        """Return the problems of what changes from round to round."""
        found = []
        for option, entry in _SCHEDULES.items():
            text = getattr(self, entry)
            if text is None:
                continue
            own, fixed = f"--outer-optimizer-{option}-schedule", f"--outer-optimizer-{option}"
            if option not in kind.options:
                found.append(f"{own} has no effect with --outer-optimizer {self.name}; drop it")
                continue
            if not kind.follows_schedules():
                found.append(
                    f"{own}: --outer-optimizer {self.name} cannot change from round to round (it has no `change`); "
                    "drop it or choose another optimizer"
                )
            if getattr(self, f"outer_optimizer_{option}") != getattr(type(self), f"outer_optimizer_{option}"):
                found.append(f"{own} is in place of {fixed}; drop one of them")
            allowed, rule = _ALLOWED[option]
            found += [f"{own} {problem}" for problem in text_problems(text, allowed, rule)]
        return found

    def length_problems(self, rounds: int) -> list[str]:
        """Return which schedules do not go with the length of a run, one sentence each; the values are good.

        Args:
            rounds: of the whole training.
        """
        found = []
        for option in _SCHEDULES:
            points = self._points(option)
            problem = range_problem(points, rounds) if points else None
            if problem is not None:
                found.append(f"--outer-optimizer-{option}-schedule {problem}")
        return found

    def _points(self, option: str) -> Points:
        text = getattr(self, _SCHEDULES[option])
        return () if text is None else parse(text)

    @property
    def schedules(self) -> dict[str, str]:
        """What changes from round to round, by the name of the option."""
        texts = {option: getattr(self, entry) for option, entry in _SCHEDULES.items()}
        return {option: text for option, text in texts.items() if text is not None}

    def options_of_round(self, number: int) -> dict[str, float]:
        """Return those of `arguments` that change from round to round, as they are in one; `change` takes them.

        Args:
            number: of the round, from 1.
        """
        return {option: value_at(self._points(option), number) for option in self.schedules}

    def _class_problems(self) -> list[str]:
        others = dataclasses.replace(self, outer_optim_class=None, outer_optim_kwargs={})
        if self.outer_optim_class is None:
            return ["--outer-optim-kwargs has no effect without --outer-optim-class; give the class or drop it"]
        if others != OuterOptimizerConfig():
            return [
                "--outer-optim-class replaces the --outer-optimizer options, which then have no effect; put them into "
                "--outer-optim-kwargs"
            ]
        given = self.outer_optim_kwargs
        found = [
            f"--outer-optim-kwargs: {name} is {value}; it must be finite"
            for name, value in given.items()
            if name not in ("lr", "momentum") and isinstance(value, float) and not math.isfinite(value)
        ]
        if "lr" in given and not _is_rate(given["lr"]):
            found.append(
                f"--outer-optim-kwargs: lr is {given['lr']!r}; it must be a number above 0 and at most "
                f"{_LARGEST_RATE:g}"
            )
        momentum = given.get("momentum", 0.0)
        if not (isinstance(momentum, int | float) and 0 <= momentum < 1):
            found.append(f"--outer-optim-kwargs: momentum is {momentum!r}; it must be in [0, 1)")
        return found

    @property
    def name(self) -> str:
        """What it is called: as it was asked for, or by the path of its class."""
        chosen = self.outer_optimizer if self.outer_optim_class is None else self.outer_optim_class
        return chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}"

    @property
    def class_path(self) -> str:
        """The path of the class where it is defined, whichever way it was imported; as it was asked for if unknown."""
        module, _, attribute = self.name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError):
            return self.name
        return f"{found.__module__}.{found.__qualname__}"

    @property
    def is_sgd(self) -> bool:
        """Whether it is torch's SGD."""
        return self.name in ("sgd", "torch.optim.SGD", "torch.optim.sgd.SGD")

    @property
    def momentum(self) -> float:
        """The momentum in force, the largest one where it changes; 0 for an optimizer that is not given one."""
        if self.outer_optim_class is not None:
            given = self.outer_optim_kwargs.get("momentum", 0.0)
            return float(given) if self.is_sgd and isinstance(given, int | float) else 0.0
        return self._momentum if "momentum" in self.kind.options else 0.0

    @property
    def _momentum(self) -> float:
        # An optimizer that is made with a momentum has a place for it, whatever it is in a round.
        return max((value for _, value in self._points("momentum")), default=self.outer_optimizer_momentum)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate in force, of an optimizer that has none but those of the command line, in the first round
        where it changes; None without one.
        """
        return self._rate_of(self.kind)

    def _rate_of(self, kind: "type[OuterOptimizer]") -> float | None:
        if "lr" not in kind.options:
            return None
        if self.outer_optimizer_lr_schedule is not None:
            return value_at(self._points("lr"), 1)
        return kind.default_lr if self.outer_optimizer_lr is None else self.outer_optimizer_lr

    @property
    def kind(self) -> "type[OuterOptimizer]":
        """The class that `outer_optimizer` asks for, whatever `outer_optim_class` does.

        Raises:
            UserError: there is none of that name, or it cannot be loaded.
        """
        return find_optimizer(self.outer_optimizer)

    @property
    def is_average(self) -> bool:
        """Whether there is no outer optimizer: the weights are averaged."""
        return self.outer_optim_class is None and self.kind.is_average

    @property
    def arguments(self) -> dict[str, Any]:
        """What `kind` is made with."""
        kind = self.kind
        values = {
            "lr": self._rate_of(kind),
            "momentum": self._momentum,
            "nesterov": self.outer_optimizer_nesterov,
        }
        return {name: values[name] for name in kind.options}
