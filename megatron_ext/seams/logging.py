# SPDX-License-Identifier: Apache-2.0
"""Seam: the iteration line, TensorBoard, wandb and the list of timers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks import TrainingLog, hooks
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.run_options import run_options

__all__ = ["average_layer_metrics", "patches"]

# What the training log in progress adds: Megatron prints the line and the timers deep inside one function.
_current: TrainingLog | None = None


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="logging/training-log",
            target="megatron.training.training:training_log",
            wrap=_wrap_training_log,
            serves=(TrainingLog,),
            parameters=("loss_dict", "total_loss_dict", "iteration", "skipped_iter", "is_first_iteration"),
            reason="let features average losses over workers and add their own values",
        ),
        Patch(
            name="logging/line",
            target="megatron.training.training:print_rank_last",
            wrap=_wrap_print,
            parameters=("message",),
            rebind=False,
            reason="append the features' fields to the iteration line, after Megatron's own",
        ),
        Patch(
            name="logging/timers",
            target="megatron.core.timers:Timers.log",
            wrap=_wrap_timers_log,
            parameters=("names",),
            rebind=False,
            reason="report the features' timers with Megatron's own",
        ),
        Patch(
            name="logging/timer-values",
            target="megatron.core.timers:Timers.write",
            wrap=_wrap_timers_write,
            parameters=("names", "normalizer"),
            rebind=False,
            reason="average timers over the iterations that there were since the last line",
        ),
    ]


def _wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        global _current
        given = bound_with_defaults(signature, args, kwargs).arguments
        run = run_options()
        iteration = given["iteration"]
        context = TrainingLog(
            iteration=iteration,
            printing=iteration % run.log_interval == 0 or given["is_first_iteration"],
            writing=iteration % run.tensorboard_log_interval == 0,
            total_losses=given["total_loss_dict"],
            losses=given["loss_dict"],
            skipped=bool(given["skipped_iter"]),
        )
        hooks.fire(context)
        _current = context
        try:
            result = original(*args, **kwargs)
        finally:
            _current = None
        _write(context.scalars, iteration, run.consumed_train_samples)
        return result

    return training_log


def _wrap_print(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_rank_last(message: str) -> Any:
        if _current is not None and " iteration " in message:
            message += "".join(f" {label}: {text} |" for label, text in _current.fields)
        return original(message)

    return print_rank_last


def _wrap_timers_log(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log(self: Any, names: list[str], *args: Any, **kwargs: Any) -> Any:
        if _current is not None and names:
            names = [*names, *_current.timers]
        return original(self, names, *args, **_normalized(kwargs))

    return log


def _wrap_timers_write(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **_normalized(kwargs))

    return write


def _normalized(given: dict[str, Any]) -> dict[str, Any]:
    if _current is None or not _current.timed_iterations or "normalizer" not in given:
        return given
    return {**given, "normalizer": _current.timed_iterations[-1]}


def average_layer_metrics(steps: int) -> None:
    """Make what layers have added up in the inner steps of an iteration the mean of a step, as the log expects it.

    Args:
        steps: how many there were.
    """
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # Megatron 0.18 keeps them elsewhere
        tracked = moe_utils.get_moe_layer_wise_logging_tracker().values()
        values = [entry["values"] for entry in tracked if "values" in entry]
    else:
        values = [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
    losses = MTPLossLoggingHelper.tracker.get("values")
    for value in [*values, *([] if losses is None else [losses])]:
        value.div_(steps)


def _write(scalars: dict[str, float], iteration: int, samples: int) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    for key, value in scalars.items():
        if writer:
            writer.add_scalar(key, value, iteration)
            writer.add_scalar(f"{key} vs samples", value, samples)
        if wandb:
            wandb.log({key: value}, iteration)
