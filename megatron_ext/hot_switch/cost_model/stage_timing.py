# SPDX-License-Identifier: Apache-2.0
"""Times one pipeline stage of a GPT on the installed Megatron; `megatron-ext hot-switch profile` starts it.

The stage has its share of the layers, and both the embedding and the output layer, so that it is as slow as the slowest
stage of a pipeline and a little more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.hot_switch.runtime.document_attention import attend_by_document
from megatron_ext.params import GptShape

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time rows as one rank of a tensor parallel group; rank 0 writes the seconds of each length as a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help="JSON of the fields of GptShape that are not at their defaults")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--recompute", choices=("none", "selective"), default="none")
    parser.add_argument("--attention", choices=("documents", "rows"), default="documents")
    parser.add_argument("--moe-router-topk", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    shape = replace(GptShape(**json.loads(options.shape)), dtype=torch.bfloat16)
    by_document = options.attention == "documents"
    model = _build(shape, max(options.lengths), options.recompute, options.moe_router_topk)
    if by_document:
        attend_by_document(model)
    seconds = _row_seconds(model, shape, options.lengths, repeats=options.repeats, by_document=by_document)
    if torch.distributed.get_rank() == 0:
        options.output.write_text(json.dumps(seconds), encoding="utf-8")
    return 0


def _row_seconds(
    model: Any, shape: GptShape, lengths: Sequence[int], *, repeats: int, by_document: bool
) -> list[float]:
    """Return how long the forward and backward passes of a row take, the slowest rank's median. All ranks must call it.

    Args:
        model: the stage.
        shape: its shape.
        lengths: of rows with one document each.
        repeats: measured passes of each, after two that are not counted.
        by_document: whether the model takes lengths of documents in place of a mask.
    """
    device = next(model.parameters()).device
    for length in lengths:
        # The first passes of a process find neither memory nor kernels ready.
        _pass_seconds(model, _row(length, shape, device, by_document=by_document), device)
    found = []
    for length in lengths:
        row = _row(length, shape, device, by_document=by_document)
        times = [_pass_seconds(model, row, device) for _ in range(repeats + 1)][1:]
        slowest = torch.tensor(statistics.median(times), device=device)
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        found.append(float(slowest))
    return found


def _build(shape: GptShape, longest: int, recompute: str, active_experts: int) -> Any:
    from megatron_ext import patch_megatron
    from megatron_ext.activation import registry
    from megatron_ext.seams import norms

    patch_megatron()
    registry().apply(norms.patches())
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    on_gpu = torch.cuda.is_available()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    ranks = torch.distributed.get_world_size()
    if on_gpu:
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        gated_linear_unit=shape.gated_linear_unit,
        activation_func=torch.nn.functional.silu if shape.gated_linear_unit else torch.nn.functional.gelu,
        add_bias_linear=shape.add_bias_linear,
        add_qkv_bias=shape.add_qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        normalization=shape.normalization,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        transformer_impl="local",
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        recompute_granularity=None if recompute == "none" else recompute,
        **_experts(shape, active_experts),
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, False, normalization=config.normalization),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=longest,
        share_embeddings_and_output_weights=shape.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model.cuda().bfloat16() if on_gpu else model.bfloat16()


def _experts(shape: GptShape, active: int) -> dict[str, Any]:
    """Return the fields of a `TransformerConfig` about experts, all of which a rank has its part of."""
    if not shape.num_moe_experts:
        return {}
    return {
        "num_moe_experts": shape.num_moe_experts,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size or shape.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size,
        "moe_router_topk": active,
        "moe_token_dispatcher_type": "alltoall",
    }


def _row(length: int, shape: GptShape, device: torch.device, *, by_document: bool) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([[length]])
    mask = lengths if by_document else torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(shape.padded_vocab_size, (1, length), generator=generator).to(device)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(length, device=device)[None],
        "attention_mask": mask,
        "labels": tokens.roll(-1, dims=1),
    }


def _pass_seconds(model: Any, row: dict[str, torch.Tensor], device: torch.device) -> float:
    torch.distributed.barrier()
    begin = time.perf_counter()
    model(**row).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    exit_code = main()
    torch.distributed.destroy_process_group()
    sys.exit(exit_code)
