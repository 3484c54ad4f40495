# SPDX-License-Identifier: Apache-2.0
"""Seam: reading and writing Megatron's checkpoints; what is particular to the legacy format is in `legacy_format`.

The two functions patched here are looked up by `save_checkpoint` and `load_checkpoint` when they run, and
everything that Megatron's formats can do (sharding, resharding, parallel writing) stays Megatron's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.hooks import CheckpointRead, SaveContext, SavesState, SaveStart, hooks
from megatron_ext.legacy_format import legacy_seam
from megatron_ext.legacy_format.legacy_folder import is_legacy
from megatron_ext.params.fsdp_shards import local_part
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.run_options import run_options
from megatron_ext.seams.damage import damaged_file
from megatron_ext.seams.optimizer import fill_empty_states, fill_momentum, name_step_zero, take_steps
from megatron_ext.seams.optimizer_format import other_schedule, refuse_bound_format, refuse_other_optimizer

__all__ = ["load_patches", "patches", "repairs"]

_MODULE = "megatron.training.checkpointing"
_OWN_PREFIXES = ("local_sgd.", "sync_service.")
"""Of what features store beside Megatron's own entries."""


def repairs() -> list[Patch]:
    """Return the patches of this seam that let Megatron read what it wrote, and do nothing else."""
    return [
        *(
            Patch(
                name=f"repairs/{name}",
                target=f"megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.{method}",
                wrap=_wrap_load_shards,
                parameters=("state_dict",),
                rebind=False,
                reason="Megatron 0.19 reads fp32 parameters into views that require gradients, which torch refuses",
            )
            for name, method in (
                ("fp32-shards", "load_parameter_state_from_dp_reshardable"),
                ("fp32-gathered-shards", "load_parameter_state_from_dp_zero"),
            )
        ),
        Patch(
            name="repairs/sgd-state",
            target="megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
            wrap=_wrap_optimizer,
            parameters=("self", "optimizer", "config", "init_state_fn"),
            rebind=False,
            reason="Megatron 0.19 gives SGD no function that makes the state to read a torch_dist checkpoint into",
        ),
        Patch(
            name="repairs/empty-states",
            target=f"{_MODULE}:generate_state_dict",
            wrap=_wrap_empty_states,
            parameters=("optimizer",),
            reason="Megatron 0.19 leaves the state of optimizers without a step yet out of what it writes, and cannot "
            "read that",
        ),
        Patch(
            name="repairs/fsdp2-parameters",
            target="megatron.core.dist_checkpointing.optimizer:get_optim_param_to_id_map",
            wrap=_wrap_parameter_map,
            parameters=("optim_params_iter",),
            reason="Megatron 0.19 knows the parameters of FSDP2 by the identity of their local tensors, and asks for "
            "these in a way that makes new ones, so that no checkpoint can be written",
        ),
        Patch(
            name="repairs/fsdp2-steps",
            target=f"{_MODULE}:load_checkpoint",
            wrap=_wrap_load_in_place,
            parameters=("optimizer", "skip_load_to_model_and_opt"),
            reason="with FSDP2 Megatron 0.19 reads the optimizer's tensors in place and forgets its number of steps",
        ),
    ]


def load_patches() -> list[Patch]:
    """Return the patches of this seam for features that only look at what is read."""
    return [
        Patch(
            name="checkpoint/load",
            target=f"{_MODULE}:_load_base_checkpoint",
            wrap=_wrap_load,
            parameters=("load_dir", "args", "rank0", "sharded_state_dict"),
            # check_load is called where a feature is off, by the patches of arguments, which are always applied.
            serves=(CheckpointRead, SavesState.load_state, SavesState.check_load),
            reason="let features see what a checkpoint holds, and take their state out of what was read",
        ),
        Patch(
            name="checkpoint/own-keys",
            target="megatron.core.dist_checkpointing.validation:adjust_non_strict_load",
            wrap=_require_own_keys,
            parameters=("sharded_state_dict", "sharded_keys_to_remove"),
            reason="with --dist-ckpt-strictness log_all and the like, what a checkpoint lacks is left out of what is "
            "read; a feature's state is whole or refused",
        ),
        Patch(
            name="checkpoint/schedule",
            target=f"{_MODULE}:load_checkpoint",
            wrap=_wrap_load_schedule,
            reason="a resume with another schedule, as with more iterations, is told what to add in place of an "
            "assertion's traceback",
        ),
        *repairs(),
    ]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="checkpoint/generate",
            target=f"{_MODULE}:generate_state_dict",
            wrap=_wrap_generate,
            serves=(SaveStart, SavesState.save_state),
            parameters=(
                "args",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "optim_sd_kwargs",
                "model_sd_kwargs",
            ),
            reason="let features place every worker's state and their own in the checkpoint",
        ),
        *legacy_seam.patches(),
        *load_patches(),
    ]


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = bound_with_defaults(signature, args, kwargs).arguments
        if given["args"].ckpt_format == legacy_seam.LEGACY:
            result: dict[str, Any] = original(*args, **kwargs)
            return result
        optimizer_options = given["optim_sd_kwargs"] or {}
        loading = bool(optimizer_options.get("is_loading", False))
        if not loading:
            hooks.fire(SaveStart())
        state: dict[str, Any] = original(*args, **kwargs)
        if given["args"].ckpt_format != "torch_dist":
            raise UserError(
                f"--ckpt-format {given['args'].ckpt_format} cannot hold the state of several workers; use torch_dist"
            )
        context = SaveContext(
            args=given["args"],
            model=given["model"],
            optimizer=given["optimizer"],
            scheduler=given["opt_param_scheduler"],
            state=state,
            metadata=(given["model_sd_kwargs"] or {}).get("metadata", {}),
            loading=loading,
        )
        hooks.save_state(context)
        return state

    return generate_state_dict


def _wrap_optimizer(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = bound_with_defaults(signature, args, kwargs)
        config = bound.arguments["config"]
        # An optimizer in the host's memory has a state of another form.
        is_sgd = config.optimizer == "sgd" and not config.optimizer_cpu_offload
        if is_sgd and bound.arguments["init_state_fn"] is None:
            bound.arguments["init_state_fn"] = fill_momentum
        original(*bound.args, **bound.kwargs)

    return init


def _wrap_empty_states(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        optimizer = signature.bind(*args, **kwargs).arguments["optimizer"]
        filled = optimizer is not None and fill_empty_states(optimizer)
        state: dict[str, Any] = original(*args, **kwargs)
        if filled and "optimizer" in state:
            name_step_zero(state["optimizer"])
        return state

    return generate_state_dict


def _wrap_parameter_map(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.Tensor]) -> Any:
        return original(local_part(parameter) for parameter in optim_params_iter)

    return get_optim_param_to_id_map


def _wrap_load_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        bound = bound_with_defaults(signature, args, kwargs)
        given = bound.arguments
        optimizer = given["optimizer"]
        if not given["skip_load_to_model_and_opt"] or optimizer is None:
            return original(*args, **kwargs)
        given["skip_load_to_model_and_opt"] = False  # loading a model under FSDP2 does nothing
        optimizer.load_state_dict = functools.partial(take_steps, optimizer)
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            del optimizer.load_state_dict

    return load_checkpoint


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        # torch derives it from BaseException.
        from torch.distributed.checkpoint.api import CheckpointException

        given = bound_with_defaults(signature, args, kwargs).arguments
        try:
            result = original(*args, **kwargs)
        except UserError:
            raise
        except (Exception, CheckpointException) as error:  # reading damaged files raises anything
            missing = _missing(given["load_dir"], given["args"])
            if missing is not None:
                raise UserError(missing) from error
            cannot = f"--load {given['load_dir']}: the checkpoint cannot be read"
            damaged = _damaged(given["load_dir"], given["args"])
            if damaged is not None:
                raise UserError(f"{cannot}: {damaged}; load an earlier one with --ckpt-step") from error
            said = _last_line(error)
            why = "Either this run's model and parallel options are not those that it was saved with, or it is damaged"
            way = "then load an earlier one with --ckpt-step"
            if "optimizer.state." in said:
                # Megatron without this package leaves the state of an optimizer without a step out.
                way += ", or, if fp16 had skipped every step when it was saved, its weights alone with --no-load-optim"
            raise UserError(f"{cannot} ({type(error).__name__}: {said}). {why}; {way}") from error
        state, directory = result[0], result[1]
        if state is not None:
            read = CheckpointRead(
                args=given["args"],
                directory=directory,
                state=state,
                common_only=bool(given["rank0"]),
                release=bool(result[2]),
                is_legacy=result[3].name == "LEGACY",
            )
            if read.common_only:
                refuse_other_optimizer(read)
                refuse_bound_format(read)
            hooks.fire(read)
            hooks.load_state(read)
        return result

    return load_base_checkpoint


def _wrap_load_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except AssertionError as error:
            refusal = other_schedule(error, str(run_options().load))
            if refusal is None:
                raise
            raise refusal from error
        except FileNotFoundError as error:
            missing = _no_checkpoint(run_options())
            if missing is None:
                raise
            raise UserError(missing) from error

    return load_checkpoint


def _require_own_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def adjust_non_strict_load(*args: Any, **kwargs: Any) -> Any:
        lacking = signature.bind(*args, **kwargs).arguments["sharded_keys_to_remove"]
        own = sorted(key for key in lacking if key.startswith(_OWN_PREFIXES))
        if own:
            more = f" and {len(own) - 1} more" if len(own) > 1 else ""
            raise UserError(
                f"--load {run_options().load}: the checkpoint lacks {own[0]}{more}, which this run cannot resume "
                "without, whatever --dist-ckpt-strictness says; load an earlier one with --ckpt-step, or the weights "
                "alone from a checkpoint of a sync point with --no-load-optim"
            )
        return original(*args, **kwargs)

    return adjust_non_strict_load


def _wrap_load_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    wrapped: Callable[..., Any] = torch.no_grad()(original)
    return wrapped


def _missing(directory: str | None, args: Any) -> str | None:
    """Return in words that the iteration of `--ckpt-step` is not there; None where it is, or none was given."""
    # To Megatron 0 is none.
    if directory is None or directory != args.load or not args.ckpt_step:
        return None
    names = [path.name.removeprefix("iter_") for path in Path(directory).glob("iter_*")]
    there = sorted(int(name) for name in names if name.isdecimal())
    if args.ckpt_step in there:
        return None
    which = f"it has {', '.join(map(str, there))}" if there else "there are no checkpoints in it"
    return f"--ckpt-step {args.ckpt_step}: {directory} has no such iteration; {which}"


def _no_checkpoint(args: Any) -> str | None:
    """Return in words that `--pretrained-checkpoint` has no checkpoint, nor `--load`; None where one of them has."""
    from megatron.training.checkpointing import checkpoint_exists

    if args.pretrained_checkpoint is None or any(map(checkpoint_exists, (args.load, args.pretrained_checkpoint))):
        return None
    return (
        f"--pretrained-checkpoint {args.pretrained_checkpoint}: there is no checkpoint in it "
        f"(latest_checkpointed_iteration.txt), nor in --load {args.load}; give the folder of one, or drop it"
    )


def _damaged(directory: str | None, args: Any) -> str | None:
    """Return in words the visible problems of the files of the checkpoint that was to be loaded."""
    if directory is None or directory != args.load:
        return None
    folder = _folder(Path(directory), args)
    # The files of the legacy format say nothing of each other.
    is_known = folder is not None and folder.is_dir() and not is_legacy(folder)
    return damaged_file(folder) if folder is not None and is_known else None


def _folder(directory: Path, args: Any) -> Path | None:
    """Return the folder of the checkpoint that was to be loaded.

    Megatron's own way asks all ranks for their iteration, and those that could read what one of them could not are
    elsewhere by now.
    """
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

    iteration = str(args.ckpt_step or "")
    if not iteration:
        tracker = Path(get_checkpoint_tracker_filename(str(directory)))
        iteration = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    if iteration == "release":
        return Path(get_checkpoint_name(str(directory), 0, release=True, return_base_dir=True))
    if not iteration.isdecimal():
        return None
    return Path(get_checkpoint_name(str(directory), int(iteration), return_base_dir=True))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no further message"
