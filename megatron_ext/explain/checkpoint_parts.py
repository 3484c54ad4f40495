# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint in the torch_dist format holds, and its bytes: elements times the bytes of their types."""

from __future__ import annotations

from megatron_ext.explain import of_local_sgd
from megatron_ext.explain.lone_rank import LoneRank
from megatron_ext.explain.memory import state_bytes
from megatron_ext.explain.rank_figures import RankFigures, SavedPart
from megatron_ext.local_sgd.one_worker import makes_rounds
from megatron_ext.params import GptShape, gpt_parameters
from megatron_ext.spes.arguments import ownership_of

__all__ = ["parts_of"]


def parts_of(rank: LoneRank, shape: GptShape, figures: RankFigures, workers: int) -> list[SavedPart]:
    """Return the parts of a checkpoint.

    Args:
        rank: whose optimizer says what it keeps of an element.
        shape: of the model.
        figures: of the rank.
        workers: W, 1 without local SGD.
    """
    asked, ownership = rank.asked, ownership_of(rank.asked)
    tensors = [tensor for tensor in gpt_parameters(shape) if tensor.kind == "parameter"]
    parameters = sum(tensor.numel for tensor in tensors)
    trained = sum(
        tensor.numel
        for tensor in tensors
        if ownership is None or ownership.is_trained(tensor.name, asked.sync_service_index)
    )
    model = parameters * asked.params_dtype.itemsize
    parts = [SavedPart(content=f"model ({str(asked.params_dtype).removeprefix('torch.')})", nbytes=model)]
    optimizer = 0
    if not asked.no_save_optim:
        # The distributed optimizer writes its values as well, others only where they are not the model's.
        writes_values = asked.use_distributed_optimizer or asked.params_dtype.itemsize < 4
        per_element = state_bytes(rank.optimizer) / max(figures.trained, 1) + 4 * writes_values
        optimizer = round(per_element * trained)
        of_one = " of one worker" if workers > 1 else ""
        parts.append(SavedPart(content=f"inner optimizer{of_one}", nbytes=optimizer))
    if makes_rounds(asked):
        parts += of_local_sgd.saved_parts(asked, workers=workers, trained=trained, optimizer_bytes=optimizer)
    return parts
