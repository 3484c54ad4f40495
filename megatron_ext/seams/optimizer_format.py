# SPDX-License-Identifier: Apache-2.0
"""Whether this run's optimizer, in its layout, and its schedule can take the state of a checkpoint."""

from __future__ import annotations

import re
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import CheckpointRead, LoadContext
from megatron_ext.legacy_format.legacy_layout import MODEL_ARGUMENTS, OPTIMIZER_ARGUMENTS

__all__ = [
    "other_schedule",
    "refuse_bound_format",
    "refuse_other_optimizer",
    "refuse_states_by_place",
    "reshardable_problems",
]

_EXPERTS = ("expert_model_parallel_size", "expert_tensor_parallel_size")
_BUCKETS = {"ddp_bucket_size": "--ddp-bucket-size", "ddp_num_buckets": "--ddp-num-buckets"}
_BOUND_TO = {**MODEL_ARGUMENTS, **OPTIMIZER_ARGUMENTS, **_BUCKETS}
"""What the form of a distributed optimizer's state depends on that is bound to its layout: arguments, and how to call
them."""


def reshardable_problems(args: Any) -> list[str]:
    """Return why tensors of ours cannot be written beside a distributed optimizer's in the format that is asked for.

    Args:
        args: Megatron's arguments as parsed.
    """
    from megatron.core import __version__
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not args.use_distributed_optimizer or hasattr(DistributedOptimizer, "optimizer_state_keys"):
        return []
    asked = {
        "--dist-ckpt-optim-fully-reshardable": args.dist_ckpt_optim_fully_reshardable,
        "--ckpt-format torch": args.ckpt_format == "torch",
    }
    return [
        f"{option}: Megatron {__version__} writes Adam's moments alone in that format, and "
        "outer rounds have other tensors to save; drop it, or use Megatron 0.19 or newer"
        for option, is_asked in asked.items()
        if is_asked
    ]


def refuse_other_optimizer(context: CheckpointRead) -> None:
    """Refuse the state of an optimizer of another kind.

    Args:
        context: of the read; the common state is enough.

    Raises:
        UserError: naming both kinds and the way out. Megatron itself would name a tensor that is not there.
    """
    saved, args = _saved_by(context), context.args
    if saved is None:
        return
    before, now = _kind_of(saved), _kind_of(args)
    if before == now and _begins_to_shard(context, saved):
        before, now = f"{before} without --use-distributed-optimizer", f"{now} --use-distributed-optimizer"
    if before != now:
        raise UserError(
            f"--load {context.directory}: saved with {before}, this run has {now}, which cannot take its state. Give "
            "what it was saved with, or take the weights alone with --no-load-optim"
        )


def _saved_by(context: LoadContext) -> Any:
    """Return the arguments of the run that saved an optimizer's state; None where none is there or wanted."""
    saved, args = context.state.get("args"), context.args
    if saved is None or context.release or args.no_load_optim or args.finetune or saved.no_save_optim:
        return None
    return saved


def _begins_to_shard(context: LoadContext, saved: Any) -> bool:
    """Return whether the distributed optimizer is asked to take a state that was saved without it.

    Megatron 0.19 fails on the form that it then reads. The other way round the form of what was saved decides.
    """
    begins = context.args.use_distributed_optimizer and not getattr(saved, "use_distributed_optimizer", True)
    return bool(begins and not context.is_legacy)


def _kind_of(args: Any) -> str:
    """Return what decides which tensors an optimizer's state has, as options, of arguments that Megatron validated."""
    kind = f"--optimizer {args.optimizer}"
    if args.optimizer in ("muon", "adaptive_muon"):
        kind += f" --muon-scalar-optimizer {getattr(args, 'muon_scalar_optimizer', 'adam')}"
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        kind += " --use-distributed-optimizer"
    return kind


def refuse_bound_format(context: LoadContext) -> None:
    """Refuse another model-parallel layout when the optimizer's state cannot be read under it.

    Args:
        context: of the load; the common state is enough.

    Raises:
        UserError: naming the option and the ways out. Megatron itself would name none that helps.
    """
    saved, args = _saved_by(context), context.args
    if saved is None:
        return
    # Experts that are spread over ranks have an optimizer of their own, and Megatron reads two states or one.
    saved_experts = getattr(saved, "expert_model_parallel_size", 1)
    if args.num_experts and (saved_experts > 1) != (args.expert_model_parallel_size > 1):
        raise UserError(
            f"--load {context.directory}: saved with --expert-model-parallel-size {saved_experts}, "
            f"this run has {args.expert_model_parallel_size}, and with 1 experts share the optimizer of the rest, so "
            "that its state has another form. Resume with 1 on both sides or on neither, or start the optimizers fresh "
            "with --no-load-optim"
        )
    if _form_of(context) != "dp_reshardable":
        return
    for name, flag in _BOUND_TO.items():
        if name in _EXPERTS and not args.num_experts:
            continue
        # Without that, gradients are in one bucket whatever is asked for.
        if name in _BUCKETS and not (args.overlap_grad_reduce or getattr(saved, "overlap_grad_reduce", True)):
            continue
        before, now = getattr(saved, name, None), getattr(args, name)
        if before != now:
            raise UserError(
                f"--load {context.directory}: saved with {flag} {before}, this run has {now}, and the optimizer state "
                "is in a format that is bound to that. Resume with the options it was saved with and save with "
                "--dist-ckpt-optim-fully-reshardable, or start the optimizers fresh with --no-load-optim"
            )


def refuse_states_by_place(context: LoadContext) -> None:
    """Refuse an optimizer's state of which the parts of single parameters cannot be taken.

    Args:
        context: of the load; the common state is enough.

    Raises:
        UserError: naming the ways out.
    """
    form = "--ckpt-format torch" if context.is_legacy else _form_of(context)
    if form not in (None, "fully_reshardable"):
        more = " and without --ckpt-format torch" if context.is_legacy else ""
        raise UserError(
            f"--load {context.directory}: its optimizer trained all experts, this peer trains some, and its state's "
            f"form ({form}) does not tell them apart. Let the job that saves it do so with "
            f"--dist-ckpt-optim-fully-reshardable{more}, or take the weights alone with --no-load-optim"
        )


def other_schedule(error: AssertionError, directory: str) -> UserError | None:
    """Return what to tell the user where Megatron's schedule did not take the state of a checkpoint's; None elsewhere.

    Args:
        error: that loading the checkpoint raised.
        directory: the folder that it was loaded from.
    """
    said = re.fullmatch(
        r"OptimizerParamScheduler: class input value (.*) and checkpoint ?value (.*) for (.*) do not match", str(error)
    )
    if said is None:
        return None
    now, before, name = said.groups()
    counted = " samples" if "iterations" in name else ""  # what Megatron calls iterations
    return UserError(
        f"--load {directory}: {name} of the schedule of learning rate and weight decay: {before}{counted} in the run "
        f"that saved it, {now}{counted} in this one. Where that is meant, as with more --train-iters or "
        "--train-samples, add --override-opt_param-scheduler for the schedule that this run's options give, or "
        "--use-checkpoint-opt_param-scheduler for the one that was saved"
    )


def _form_of(context: LoadContext) -> str | None:
    """Return what Megatron calls the form of a distributed optimizer's state; None without one."""
    from megatron.core.dist_checkpointing import load_content_metadata

    metadata = load_content_metadata(preloaded_state_dict=context.state) or {}
    found: str | None = metadata.get("distrib_optim_sharding_type")
    return found
