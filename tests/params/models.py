# SPDX-License-Identifier: Apache-2.0
"""Real Megatron GPTs on CPU, one layout after the other in one process. Only for use in rank processes."""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from megatron_ext.params import GlobalTensor
from tests.support import presets

HIDDEN = 32
VOCABULARY = 128
SEQUENCE = 16

_FLAGS = ("no_rope_fusion", "position_embedding_type", "disable_bias_linear")
LATENT: dict[str, Any] = {
    **{name: value for name, value in presets.LATENT.items() if name not in _FLAGS},
    "add_bias_linear": False,
}
"""Multi-latent attention, as fields of `MLATransformerConfig`."""


def start_cpu(backend: str = "gloo", rank: int | None = None, world_size: int | None = None) -> None:
    """Activate the CPU backend once, and start torch.distributed.

    With the `fake` backend, torch's own for dry runs, one process can stand for any rank of any job: groups
    have the right sizes and ranks, and nothing is sent.
    """
    from megatron_ext.backends.cpu import CpuBackend
    from megatron_ext.patching import PatchRegistry

    if not getattr(start_cpu, "done", False):
        CpuBackend().activate(PatchRegistry())
        start_cpu.done = True
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)


def build_gpt(
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    tied: bool = False,
    positions: str = "rope",
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE,
    order: str = "tp-cp-ep-dp-pp",
    optimizer: bool = False,
    **options: Any,
) -> list[torch.nn.Module]:
    """Set up Megatron's process groups for a layout, and build the rank's model chunks.

    Args:
        optimizer: whether the model will get one, which needs more process groups.
        options: fields of `TransformerConfig` beside those of the layout.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        order=order,
        create_gloo_process_groups=optimizer,
    )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    config = (MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig)(
        **{
            "num_layers": 4,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            "persist_layer_norm": False,
            "pipeline_dtype": torch.float32,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            **options,
        }
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, last = groups.pp.rank(), pp - 1
    chunks = []
    for chunk in range(vpp or 1):
        vp_stage = chunk if vpp else None
        where = {"vp_stage": vp_stage, "pp_rank": stage}
        layers = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, **where)
        predictors = None
        if config.mtp_num_layers:
            # A stage may have predictors alone, without a layer of the decoder to make them like.
            last_layer = get_gpt_decoder_layer_specs(config, False, normalization=config.normalization)[-1]
            predictors = get_gpt_mtp_block_spec(config, last_layer, False, **where)
        chunks.append(
            GPTModel(
                config,
                layers,
                mtp_block_spec=predictors,
                vocab_size=vocabulary,
                max_sequence_length=sequence,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == last and chunk == (vpp or 1) - 1,
                share_embeddings_and_output_weights=tied,
                position_embedding_type=positions,
                pg_collection=groups,
                vp_stage=vp_stage,
            )
        )
    return chunks


def full_values(tensors: Sequence[GlobalTensor]) -> dict[str, torch.Tensor]:
    """Made-up values of whole tensors, the same in every process."""
    values = {}
    for tensor in tensors:
        generator = torch.Generator().manual_seed(crc32(tensor.name.encode()))
        values[tensor.name] = torch.randn(tensor.shape, generator=generator).mul(0.1).to(tensor.dtype)
    return values


def load_values(view: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Give this rank's parameters and buffers their parts of the full values."""
    from megatron_ext.params import scatter

    entries = (*view.entries, *view.buffers)
    local = scatter(values, [entry.placed for entry in entries])
    with torch.no_grad():
        for entry in entries:
            entry.parameter.copy_(local[entry.placed.name])


def gather_object(value: Any) -> list[Any]:
    """The value of every rank, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
