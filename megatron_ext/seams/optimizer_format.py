# SPDX-License-Identifier: Apache-2.0
"""Whether this run's layout can read the optimizer state of a checkpoint."""

from __future__ import annotations

from megatron_ext.errors import UserError
from megatron_ext.hooks import LoadContext

__all__ = ["refuse_bound_format"]

_BOUND_TO = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "use_distributed_optimizer",
    "bf16",
    "fp16",
    "ddp_bucket_size",
    "ddp_num_buckets",
)
"""Options on which the form of a distributed optimizer's state depends that is bound to its layout."""


def refuse_bound_format(context: LoadContext) -> None:
    """Refuse another model-parallel layout when the optimizer's format is bound to the one it was saved in.

    Args:
        context: of the load; the common state is enough.

    Raises:
        UserError: naming the option and the ways out. Megatron itself would name none that helps.
    """
    saved, args = context.state.get("args"), context.args
    if saved is None or args.no_load_optim or args.finetune:
        return
    from megatron.core.dist_checkpointing import load_content_metadata

    metadata = load_content_metadata(preloaded_state_dict=context.state) or {}
    if metadata.get("distrib_optim_sharding_type") != "dp_reshardable":
        return
    for name in _BOUND_TO:
        before, now = getattr(saved, name, None), getattr(args, name)
        if before != now:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"--load {context.directory}: saved with {flag} {before}, this run has {now}, and the optimizer state "
                "is in a format that is bound to that. Resume with the options it was saved with and save with "
                "--dist-ckpt-optim-fully-reshardable, or start the optimizers anew with --no-load-optim"
            )
