# SPDX-License-Identifier: Apache-2.0
"""What a rank's optimizer owns, for every kind of optimizer, over real processes."""

from typing import Any

import pytest
import torch

from megatron_ext.params import ParameterView, ParamsError, put
from tests.params.models import build_gpt, full_values, gather_object, load_values, start_cpu
from tests.support.distributed import run_ranks

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "gated_linear_unit": True}


def _build(
    options: dict[str, Any], *, bf16: bool = False, distributed: bool = False, frozen: str = ""
) -> tuple[Any, ParameterView]:
    """An optimizer and the view of its model, whose parameters had made-up values before it was built."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    start_cpu()
    dtype = torch.bfloat16 if bf16 else torch.float32
    cores = build_gpt(
        optimizer=True, bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype, num_layers=2, **options
    )
    view = ParameterView.from_model(cores)
    load_values(view, full_values(view.placement.tensors))
    for entry in view.entries:
        entry.parameter.requires_grad_(entry.tensor.name != frozen)
    config = cores[0].config
    chunks = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=distributed, bucket_size=5000),
            Float16Module(config, core) if bf16 else core,
            pg_collection=core.pg_collection,
        )
        for core in cores
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=bf16, use_distributed_optimizer=distributed), chunks
    )
    return optimizer, ParameterView.from_model(chunks)


def _owned_elements(options: dict[str, Any], bf16: bool, distributed: bool) -> tuple[int, int]:
    from megatron_ext.params.optimizer_shards import dp_shards

    optimizer, view = _build(options, bf16=bf16, distributed=distributed)
    shards = dp_shards(optimizer, view)
    assert [shard.entry for shard in shards] == list(view.entries)
    values = full_values(view.placement.tensors)
    for shard in shards:
        assert (shard.main is None) == (shard.numel == 0)
        if shard.main is not None:
            assert shard.main.dtype == torch.float32
            mine = shard.entry.parameter.detach().reshape(-1)[shard.start : shard.stop]
            assert torch.equal(shard.main, mine.float())
            if not bf16:
                assert shard.main.data_ptr() == mine.data_ptr()
    everyone = gather_object(
        [
            (shard.entry.placed, shard.start, shard.stop, None if shard.main is None else shard.main.clone())
            for shard in shards
        ]
    )
    if distributed:
        # All data parallel ranks together own every element of every replica group exactly once.
        counts = {tensor.name: torch.zeros(tensor.shape) for tensor in view.placement.tensors}
        sums = {name: torch.zeros_like(count) for name, count in counts.items()}
        for placed, start, stop, main in (shard for rank in everyone for shard in rank):
            if placed.is_primary and main is not None:
                once = torch.zeros(placed.tensor.shape)
                put(torch.ones(stop - start), placed.slice, once, start, stop)
                counts[placed.tensor.name] += once
                put(main, placed.slice, sums[placed.tensor.name], start, stop)
        for name, count in counts.items():
            assert torch.equal(count, torch.ones_like(count)), name
            assert torch.equal(sums[name], values[name].float()), name
    else:
        assert all(shard.numel == shard.entry.slice.numel for shard in shards)
    return sum(shard.numel for shard in shards), sum(shard.numel != shard.entry.slice.numel for shard in shards)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(4, {"tp": 2, "gated_linear_unit": True}, id="tp2-dp2"),
        pytest.param(4, {"ep": 2, **EXPERTS}, id="ep2-dp4"),
    ],
)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_distributed_optimizers_share_every_element_exactly_once(
    world: int, options: dict[str, Any], bf16: bool
) -> None:
    owned = run_ranks(_owned_elements, world, options, bf16, True)
    assert any(partial for _, partial in owned)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_other_optimizers_own_all_of_their_parameters(bf16: bool) -> None:
    first, second = run_ranks(_owned_elements, 2, {}, bf16, False)
    assert first == second


def _frozen_and_strange() -> tuple[list[str], str, str]:
    from megatron_ext.params.optimizer_shards import dp_shards

    frozen = "decoder.layers.0.mlp.linear_fc1.weight"
    optimizer, view = _build({}, distributed=True, frozen=frozen)
    trained = {shard.entry.tensor.name for shard in dp_shards(optimizer, view)}
    left_out = [entry.tensor.name for entry in view.entries if entry.tensor.name not in trained]

    class UnheardOfOptimizer:
        pass

    with pytest.raises(ParamsError) as unknown:
        dp_shards(UnheardOfOptimizer(), view)
    other_optimizer, _ = _build({})
    with pytest.raises(ParamsError) as foreign:
        dp_shards(other_optimizer, view)
    return left_out, str(unknown.value), str(foreign.value)


def test_frozen_parameters_are_left_out_and_strangers_refused() -> None:
    ((left_out, unknown, foreign),) = run_ranks(_frozen_and_strange, 1)
    assert left_out == ["decoder.layers.0.mlp.linear_fc1.weight"]
    assert "which elements a UnheardOfOptimizer updates" in unknown
    assert "is not in the parameter view" in foreign
