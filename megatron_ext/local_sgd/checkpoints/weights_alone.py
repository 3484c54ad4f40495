# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of weights without optimizers' states (`--no-save-optim`): what a stock job of one worker would write.

All workers hold the same weights then, those of the last round, and the same biases of routers, so that nothing else is
needed, and any job can load them. None resumes the run.
"""

from __future__ import annotations

from megatron_ext.hooks import SaveContext
from megatron_ext.local_sgd.checkpoints.legacy_files import part_of
from megatron_ext.seams.sharded_state import is_model_key

__all__ = ["keep_weights_alone"]


def keep_weights_alone(context: SaveContext, worker: int) -> None:
    """Let worker 0 write its weights and random state, in place.

    In Megatron's legacy format (`--ckpt-format torch`) the others write the same beside it.

    Args:
        context: of the save.
        worker: index of this rank's.
    """
    if context.files is not None:
        context.files.part = part_of(worker, synced=True)
    elif worker != 0:
        for key in [key for key in context.state if is_model_key(key) or key == "rng_state"]:
            del context.state[key]
