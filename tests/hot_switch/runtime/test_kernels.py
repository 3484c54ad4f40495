# SPDX-License-Identifier: Apache-2.0
"""Hot switching on the kernels of Transformer Engine itself, which needs a GPU; the rest of it runs on a double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hot_switch.runs import (
    COMMON,
    EXPERTS_APART,
    LLAMA,
    arguments,
    assert_resumed,
    forbid_attention_by_document,
    losses,
    stock_run,
)
from tests.hot_switch.test_transformer_engine import DENSE
from tests.support.distributed import run_ranks
from tests.support.presets import GROUPED, toy_gpt
from tests.support.pretrain import RankOutcome, run_pretrain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("transformer_engine")]

KERNELS = {
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "bf16": True,
    "use_distributed_optimizer": True,
    "hidden_size": 128,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "train_iters": 6,
    "no_rope_fusion": None,
}
EXPERTS = {**GROUPED, "moe_aux_loss_coeff": 0.0}


def in_longer_rows(strategies: str) -> str:
    """Give strategies for the double's toys the rows of these."""
    return strategies.replace("[32, 16, 8, 0]", "[128, 64, 32, 0]")


def assert_equal_except_for_bf16(ours: list[RankOutcome], theirs: list[RankOutcome]) -> None:
    """Compare losses and gradient norms of two runs that round to 8 bits at other places."""
    assert len(losses(ours)) == len(losses(theirs)) > 0
    assert losses(ours) == pytest.approx(losses(theirs), rel=0, abs=5e-3)
    assert ours[0].grad_norms == pytest.approx(theirs[0].grad_norms, rel=2e-2)


@pytest.mark.parametrize(
    ("strategies", "home", "layout", "options"),
    [
        (DENSE, "2,2,1", {"sequence_parallel": True}, {**LLAMA, "no_rope_fusion": None}),
        (EXPERTS_APART, "4,1,1", {"expert_model_parallel_size": 2}, EXPERTS),
    ],
    ids=["dense", "grouped experts"],
)
def test_hot_equals_static(tmp_path: Path, strategies, home, layout, options):
    file = tmp_path / "strategies.yaml"
    file.write_text(in_longer_rows(strategies))
    options = {**KERNELS, **options}
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, before=forbid_attention_by_document)
    assert_equal_except_for_bf16(hot, stock_run(home, **{**layout, **options}))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    options = {**LLAMA, **KERNELS, "hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 4}
    options |= {"eval_iters": 1, "eval_interval": 3, "deterministic_mode": True}
    hot = ["2,1,1", "1,2,1"], [128, 48, 0]
    through = run_pretrain(arguments(*hot, **options, save=str(tmp_path), save_interval=2), 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_pretrain(arguments(*hot, **options, load=str(tmp_path)), 2)
    assert len(set(losses(through))) == 4
    assert_resumed(resumed, through, after=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_rows_have_the_attention_of_each_document_alone(dtype):
    ((calls, apart),) = run_ranks(attend_both_ways, 1, str(dtype))
    assert calls == 1
    # Of values and gradients of about 1, in numbers of 8 or 11 bits.
    assert max(apart) < (0.03 if dtype is torch.bfloat16 else 0.01), apart


def attend_both_ways(dtype: str) -> tuple[int, list[float]]:
    """Return how often the kernels attended, and how far apart values and gradients are from those in fp32."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.hot_switch.data.rows import document_lengths
    from megatron_ext.hot_switch.runtime import document_attention as attention
    from tests.hot_switch.runtime.test_document_attention import packed

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    kind = getattr(torch, dtype.removeprefix("torch."))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        bf16=kind is torch.bfloat16,
        fp16=kind is torch.float16,
        params_dtype=kind,
    )
    holder = torch.nn.Module()
    holder.core_attention = TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    calls = _count(attention)
    attention.attend_by_document(holder)
    batch = packed([[17, 40, 3], [64], [1, 1, 30]], 5)
    lengths = document_lengths(batch.segments)
    rows, positions = batch.tokens.shape
    torch.manual_seed(0)
    drawn = [torch.randn(positions, rows, heads, 32, device="cuda").to(kind) for heads in (4, 2, 2)]
    ours = [tensor.clone().requires_grad_() for tensor in drawn]
    theirs = [tensor.float().requires_grad_() for tensor in drawn]
    counts = (batch.segments >= 0).T[..., None].cuda()
    found = holder.core_attention(*ours, lengths, attn_mask_type=AttnMaskType.padding_causal)
    exact = attention.attend_within_documents(*theirs, lengths, scale=32**-0.5)
    weights = torch.randn_like(exact) * counts
    (found.float() * weights).sum().backward()
    (exact * weights).sum().backward()
    pairs: list[tuple[Any, Any]] = [(found * counts, exact * counts)]
    pairs += [(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True)]
    return calls[0], [float((one.float() - other).abs().max()) for one, other in pairs]


def _count(attention: Any) -> list[int]:
    calls, original = [0], attention._attend_at_once

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        return original(*args, **kwargs)

    attention._attend_at_once = counted
    return calls
