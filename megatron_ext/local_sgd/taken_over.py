# SPDX-License-Identifier: Apache-2.0
"""What a run must have in common with the one whose saved state it takes over, and what it may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.codecs.all_codecs import takes_density
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["changes", "method_of", "refuse_other_method", "refuse_other_model", "tuning_of"]


def method_of(
    config: LocalSGDConfig, outer: OuterOptimizerConfig, gta: GTAConfig, streaming: StreamingConfig
) -> dict[str, Any]:
    """Return by flag the settings that a run must not change."""
    is_class = outer.outer_optim_class is not None
    own: dict[str, Any] = {
        "--outer-optimizer": None if is_class else outer.outer_optimizer,
        "--outer-optim-class": outer.class_path if is_class else None,
        "--local-sgd-codec": config.codec,
        "--local-sgd-use-async": config.use_async,
    }
    # What it keeps of a parameter may depend on any of them but the learning rate.
    arguments = {name: value for name, value in outer.outer_optim_kwargs.items() if name != "lr"}
    own["--outer-optim-kwargs (beside lr)"] = arguments or None
    return {**own, **gta.by_flag(), **streaming.by_flag()}


def tuning_of(config: LocalSGDConfig, outer: OuterOptimizerConfig) -> dict[str, Any]:
    """Return by flag the settings that a run may change, which the log names."""
    found: dict[str, Any] = {"--local-sgd-sync-interval": config.local_sgd_sync_interval}
    if config.skip_anomaly:
        found["--local-sgd-skip-anomaly"] = True
        found["--local-sgd-ewma-alpha"] = config.ewma_alpha
        found["--local-sgd-ewma-threshold"] = config.ewma_threshold
        found["--local-sgd-ewma-official-start"] = config.ewma_official_start
        found["--local-sgd-ewma-relearn-rounds"] = config.ewma_relearn_rounds
    if config.clip_pseudo_grad:
        found["--local-sgd-clip-pseudo-grad"] = config.clip_pseudo_grad
    if config.pseudo_gradnorm_reduce:
        found["--local-sgd-pseudo-gradnorm-reduce"] = True
        found["--local-sgd-weight-softmax-temperature"] = config.weight_softmax_temperature
        found["--local-sgd-weight-scale-free"] = config.weight_scale_free
    if takes_density(config.codec):
        found["--local-sgd-codec-density"] = config.codec_density
    if config.use_async:
        found["--local-sgd-sync-time"] = config.local_sgd_sync_time
        found["--local-sgd-min-total-global-steps"] = config.min_total_global_steps
    if config.use_step_weight:
        found["--local-sgd-use-step-weight"] = True
        found["--local-sgd-step-weight-ratio"] = config.step_weight_ratio
    if outer.outer_optim_class is not None:
        return {**found, "--outer-optim-kwargs": dict(outer.outer_optim_kwargs)}
    fixed = {name: value for name, value in outer.arguments.items() if name not in outer.schedules}
    changing = {f"{name}-schedule": text for name, text in outer.schedules.items()}
    return {**found, **{f"--outer-optimizer-{name}": value for name, value in {**fixed, **changing}.items()}}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return by flag what was and what is of the things of `tuning_of` that differ, or that one side does not have."""
    none = "not given"
    return {
        flag: (before.get(flag, none), now.get(flag, none))
        for flag in {**now, **before}
        if before.get(flag, none) != now.get(flag, none)
    }


def refuse_other_method(saved: dict[str, Any], now: dict[str, Any], where: str, way_out: str) -> None:
    """Refuse another outer optimizer or codec, whose state would be missing, another reducer, other fragments.

    Args:
        saved: what `method_of` returned in the run that saved.
        now: what it returns in this run.
        where: the saved state, for the message.
        way_out: what to do instead.

    Raises:
        UserError: they differ.
    """
    defaults = method_of(LocalSGDConfig(), OuterOptimizerConfig(), GTAConfig(), StreamingConfig())
    # An option that the run which saved did not know of had its default. One choice may be that of two options.
    differ = [
        f"{flag} was {_shown(before)} in the run that saved it, and is {_shown(value)} now"
        for flag, before, value in ((flag, saved.get(flag, defaults[flag]), value) for flag, value in now.items())
        if value != before
    ]
    if differ:
        raise UserError(f"{where}: {'; '.join(differ)}; {way_out}")


def refuse_other_model(saved: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]], where: str) -> None:
    """Refuse the state of another model by the name of a parameter.

    Args:
        saved: by name, the shape of every parameter of the model that was saved.
        now: the same of this run's.
        where: the saved state, for the message.

    Raises:
        UserError: they differ.
    """
    said = f"{where}: it was saved by another model:"
    way_out = "give the options of the run that saved it, or load another checkpoint"
    for name in [*now, *saved]:
        if name not in saved:
            raise UserError(f"{said} it has no parameter {name}, which this model has; {way_out}")
        if name not in now:
            raise UserError(f"{said} this model has no parameter {name}, which it has; {way_out}")
        if list(saved[name]) != list(now[name]):
            raise UserError(
                f"{said} {name} has the shape {list(saved[name])} there and {list(now[name])} here; {way_out}"
            )


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)
