# SPDX-License-Identifier: Apache-2.0
"""Whether this run's layout is the one that a checkpoint in Megatron's legacy format is bound to."""

from __future__ import annotations

from typing import Any

from megatron_ext.errors import UserError

__all__ = ["MODEL_ARGUMENTS", "OPTIMIZER_ARGUMENTS", "refuse_other_layout"]

MODEL_ARGUMENTS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "a virtual pipeline size of",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
"""What cuts a model over ranks: arguments of Megatron, and how to call them."""

OPTIMIZER_ARGUMENTS = {
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "bf16": "--bf16",
    "fp16": "--fp16",
}
"""What decides the form of the optimizer's state besides, in the same way."""


def refuse_other_layout(state: dict[str, Any], args: Any, directory: str) -> None:
    """Refuse a checkpoint in the legacy format that another layout saved.

    Args:
        state: what its first file holds.
        args: Megatron's arguments.
        directory: that it was loaded from.

    Raises:
        UserError: naming the option and the way out. Megatron itself ends without an error, or hangs.
    """
    saved = state.get("args")
    if saved is None:
        return
    wants_states = not (args.no_load_optim or args.finetune or saved.no_save_optim)
    bound = {**MODEL_ARGUMENTS, **(OPTIMIZER_ARGUMENTS if wants_states else {})}
    for name, flag in bound.items():
        before, now = getattr(saved, name, None), getattr(args, name)
        if before != now:
            more = "" if name in MODEL_ARGUMENTS else ", or take the weights alone with --no-load-optim"
            raise UserError(
                f"--load {directory}: saved with {flag} {before}, this run has {now}, and --ckpt-format torch has a "
                f"file for every rank of a layout. Give what it was saved with{more}; a run that loads it without "
                "--ckpt-format torch saves it in torch_dist, which other layouts read"
            )
