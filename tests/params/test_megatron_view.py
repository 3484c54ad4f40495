# SPDX-License-Identifier: Apache-2.0
"""The view of live Megatron models, against what Megatron itself says, stores and computes."""

from typing import Any

import pytest
import torch

from megatron_ext.params import GlobalTensor, ParameterView, ParamsError, gather
from tests.params.models import LATENT, VOCABULARY, build_gpt, full_values, gather_object, load_values, start_cpu
from tests.support.distributed import run_ranks

SWIGLU_GQA: dict[str, Any] = {
    "gated_linear_unit": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MOE: dict[str, Any] = {
    "gated_linear_unit": True,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 64,
    "add_bias_linear": False,
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"world": 1},
    "tp2 pp2 tied": {"tp": 2, "pp": 2, "tied": True, **SWIGLU_GQA},
    "tp4 with fewer query groups": {"tp": 4, "num_query_groups": 2, "positions": "learned_absolute"},
    "tp2 pp2 vpp2 tied, with biases": {"tp": 2, "pp": 2, "vpp": 2, "tied": True, "gated_linear_unit": True},
    "tp2 pp2 dp2 in another rank order": {"world": 8, "tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"},
    "dense layers before expert layers": {
        "tp": 2,
        "ep": 2,
        "etp": 1,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_gate": True,
        "qk_layernorm": True,
        **MOE,
    },
    "experts with biases": {"tp": 2, "ep": 2, "etp": 1, "num_moe_experts": 4, "gated_linear_unit": True},
    "experts cut by tp too": {"world": 8, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "moe_layer_freq": 2, **MOE},
    "etp larger than tp": {"tp": 1, "ep": 1, "etp": 4, **MOE},
    "output gate and qkv bias": {
        "tp": 2,
        "attention_output_gate": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
    },
    "latent attention": {"tp": 2, "pp": 2, **LATENT},
    "latent attention without norms, queries projected at once": {
        "tp": 4,
        **LATENT,
        "q_lora_rank": None,
        "qk_layernorm": False,
        "softmax_type": "learnable",
    },
    "learnable softmax": {"tp": 4, "softmax_type": "learnable"},
    "uneven first and last stage": {
        "pp": 4,
        "num_layers": 7,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 2,
    },
    "uneven with interleaving": {
        "world": 6,
        "pp": 3,
        "vpp": 2,
        "num_layers": 10,
        "num_layers_in_first_pipeline_stage": 2,
        "num_layers_in_last_pipeline_stage": 4,
    },
    "embedding and loss count as layers": {
        "pp": 2,
        "vpp": 2,
        "num_layers": 6,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    "stages written out": {
        "pp": 2,
        "vpp": 2,
        "num_layers": 5,
        "pipeline_model_parallel_layout": "Et|tt||ttL",
        "tied": True,
    },
    "multi-token prediction": {"tp": 2, "pp": 2, "mtp_num_layers": 2, **SWIGLU_GQA},
    "multi-token prediction on a stage of its own": {
        "world": 6,
        "tp": 2,
        "pp": 3,
        "mtp_num_layers": 2,
        "num_layers": 2,
        "pipeline_model_parallel_layout": "Ett|mm|L",
    },
    "multi-token prediction on the last stage without layers": {
        "pp": 2,
        "mtp_num_layers": 1,
        "num_layers": 2,
        "pipeline_model_parallel_layout": "Ett|mL",
    },
    "multi-token prediction of a tied model on one stage": {"tp": 2, "mtp_num_layers": 1, "tied": True},
    "multi-token prediction by one repeated layer with experts": {
        "pp": 2,
        "vpp": 2,
        "ep": 2,
        "mtp_num_layers": 2,
        "mtp_use_repeated_layer": True,
        **MOE,
    },
    "multi-token prediction over latent attention": {"tp": 2, "mtp_num_layers": 1, **LATENT},
}


def _check_every_rank(world: int, options: dict[str, Any]) -> None:
    from megatron_ext.params.checks import check_chunk

    for rank in range(world):
        start_cpu("fake", rank, world)
        chunks = build_gpt(**options)
        view = ParameterView.from_model(chunks)  # compares with the layer by layer form
        assert view.place == view.layout.coordinates(rank)
        assert len(view.entries) == sum(len(list(chunk.parameters())) for chunk in chunks)
        for index, chunk in enumerate(chunks):
            entries = [entry for entry in (*view.entries, *view.buffers) if entry.chunk_index == index]
            check_chunk(chunk, view.placement, entries, chunk.pg_collection, homogeneous=True)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_rank_agrees_with_megatrons_sharded_state_dict(case: str) -> None:
    options = dict(LAYOUTS[case])
    world = options.pop("world", 4)
    run_ranks(_check_every_rank, 1, world, options)


def _check_stored_values(options: dict[str, Any]) -> list[str]:
    start_cpu()
    chunks = build_gpt(**options)
    view = ParameterView.from_model(chunks)
    values = full_values(view.placement.tensors)
    load_values(view, values)

    entries = (*view.entries, *view.buffers)
    shards = gather_object([(entry.placed, entry.parameter.detach()) for entry in entries])
    held = [([placed for placed, _ in rank], {p.name: value for p, value in rank}) for rank in shards]
    gathered = gather(view.placement.tensors, held)
    assert all(torch.equal(gathered[name], value) for name, value in values.items())

    stored = _stored_by_megatron(chunks)
    for tensor in view.placement.tensors:
        assert torch.equal(_stored_value(stored, tensor), values[tensor.name]), tensor.name
    return sorted(stored)


def _stored_by_megatron(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Whole tensors by checkpoint key, put together from all ranks' sharded state dicts."""
    shards = []
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": chunk.pg_collection.dp_cp})
        for item in state.values():
            parts = item.build() if hasattr(item, "build") else [item]
            shards += [
                (part.key, part.global_shape, part.global_slice(), part.data)
                for part in parts
                if hasattr(part, "global_slice")
            ]
    stored: dict[str, torch.Tensor] = {}
    for key, shape, place, data in (shard for rank in gather_object(shards) for shard in rank):
        stored.setdefault(key, torch.full(shape, torch.nan))[place] = data.detach()
    return stored


def _stored_value(stored: dict[str, torch.Tensor], tensor: GlobalTensor) -> torch.Tensor:
    """A tensor's value in a checkpoint of a homogeneous model: layers and experts are leading axes."""
    name = tensor.name
    if tensor.layer is None:
        return stored[name]
    name = name.replace(f"layers.{tensor.layer}.", "layers.")
    if name not in stored:  # norms have Transformer Engine's names in most checkpoints
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if tensor.expert is None:
        return stored[name][tensor.layer]
    name = name.replace(f"experts.{tensor.expert}.", "experts.experts.")
    return stored[name][tensor.layer, tensor.expert]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, {}, id="one-rank"),
        pytest.param(2, {"tp": 2, **SWIGLU_GQA}, id="tp2-gqa-swiglu"),
        pytest.param(2, {"pp": 2, "positions": "learned_absolute"}, id="pp2"),
        pytest.param(2, {"pp": 2, "vpp": 2, "tied": True}, id="pp2-vpp2-tied"),
        pytest.param(2, {"ep": 2, **MOE}, id="moe-ep2"),
        pytest.param(2, {"tp": 2, **LATENT}, id="tp2-latent-attention"),
        pytest.param(4, {"tp": 2, "pp": 2, "tied": True, **SWIGLU_GQA}, id="tp2-pp2-tied"),
        pytest.param(4, {"tp": 2, "pp": 2, **SWIGLU_GQA}, id="tp2-pp2-untied"),
    ],
)
def test_values_given_through_the_view_lie_where_megatron_stores_them(
    world: int, options: dict[str, Any]
) -> None:
    keys, *_ = run_ranks(_check_stored_values, world, options)
    assert "embedding.word_embeddings.weight" in keys
    assert ("output_layer.weight" in keys) == (not options.get("tied"))


def _logits_of_two_layouts(first: dict[str, Any], second: dict[str, Any]) -> float:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    results = []
    start_cpu()
    for layout in (first, second):
        (model,) = build_gpt(**layout)
        view = ParameterView.from_model([model])
        load_values(view, full_values(view.placement.tensors))
        tokens = torch.arange(2 * 16).reshape(2, 16) * 7 % VOCABULARY
        with torch.no_grad():
            logits = model(tokens, torch.arange(16)[None], None)
        results.append(gather_from_tensor_model_parallel_region(logits.transpose(0, 1).contiguous()))
    assert float(results[0].std()) > 1e-3
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"tp": 1, **SWIGLU_GQA}, {"tp": 2, **SWIGLU_GQA}, id="tp"),
        pytest.param(
            {"tp": 2, "num_query_groups": 1}, {"tp": 1, "num_query_groups": 1}, id="one-query-group"
        ),
        pytest.param({"tp": 1, **LATENT}, {"tp": 2, **LATENT}, id="latent-attention"),
        pytest.param(
            {"ep": 1, **MOE}, {"ep": 2, "moe_token_dispatcher_type": "alltoall", **MOE}, id="experts"
        ),
    ],
)
def test_the_same_full_values_make_the_same_function_under_any_layout(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    assert max(run_ranks(_logits_of_two_layouts, 2, first, second)) < 1e-5


def _tied_last_stage() -> str:
    start_cpu("fake", 1, 2)
    chunks = build_gpt(pp=2, tied=True, vocabulary=136, num_layers=2)
    chunks[0].bfloat16()  # as a wrapper does, behind the config's back
    view = ParameterView.from_model(chunks, vocab_size=131)
    copy = view.by_parameter(chunks[0].output_layer.weight)
    assert (copy.name_local, copy.tensor.name) == ("output_layer.weight", "embedding.word_embeddings.weight")
    assert (copy.unit, copy.is_tied_copy, copy.is_primary) == ("embedding", True, False)
    assert (copy.tensor.shape, copy.tensor.valid_rows) == ((136, 32), 131)
    assert view.units() == ("embedding", "layer.0", "layer.1", "final_norm")
    assert {(entry.unit, entry.tensor.layer) for entry in view.entries if entry.tensor.layer is not None} == {
        ("layer.1", 1)
    }
    with pytest.raises(KeyError):
        view.by_parameter(torch.zeros(1))
    return view.describe()


def test_a_tied_last_stage_is_told_in_global_terms() -> None:
    (table,) = run_ranks(_tied_last_stage, 1)
    assert "pp 1/2" in table
    assert "embedding.word_embeddings.weight  136x32  136x32  bfloat16  tied copy" in table
    assert "decoder.layers.1.mlp.linear_fc1.weight  128x32" in table


def _embedded_again() -> list[tuple[str, bool, bool]]:
    start_cpu("fake", 1, 2)
    chunks = build_gpt(pp=2, num_layers=2, mtp_num_layers=2)
    view = ParameterView.from_model(chunks)
    layers = ("layer.0", "layer.1", "mtp_layer.0", "mtp_layer.1")
    assert view.units() == ("embedding", *layers, "final_norm", "output_layer")
    copy = view.by_parameter(chunks[0].embedding.word_embeddings.weight)
    assert copy.is_on_two_stages and copy.unit == "embedding"
    held = [(entry.tensor.name, entry.is_primary, entry.is_tied_copy) for entry in view.entries]
    with pytest.raises(ParamsError, match="multi-token prediction over several stages is not laid out with tied"):
        ParameterView.from_model(build_gpt(pp=2, num_layers=2, mtp_num_layers=1, tied=True))
    with pytest.raises(ParamsError, match="is not laid out with learned positions"):
        ParameterView.from_model(build_gpt(pp=2, num_layers=2, mtp_num_layers=1, positions="learned_absolute"))
    return held


def test_multi_token_prediction_has_a_copy_of_the_embedding_on_the_last_stage() -> None:
    (held,) = run_ranks(_embedded_again, 1)
    assert held[-1] == ("embedding.word_embeddings.weight", False, True)
    assert all(is_primary and not is_copy for _, is_primary, is_copy in held[:-1])
    assert ("mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight", True, False) in held


def _duplicates() -> dict[str, tuple[bool, bool]]:
    start_cpu("fake", 1, 2)
    view = ParameterView.from_model(build_gpt(tp=2, etp=1, num_layers=2, moe_layer_freq=[0, 1], **MOE))
    flags = {entry.tensor.name: (entry.is_duplicate_across_tp, entry.is_primary) for entry in view.entries}
    assert [buffer.tensor.name for buffer in view.buffers] == ["decoder.layers.1.mlp.router.expert_bias"]
    assert view.buffers[0].tensor.dtype == torch.float32
    return flags


def test_duplicates_across_tensor_parallel_ranks_are_marked() -> None:
    (flags,) = run_ranks(_duplicates, 1)
    assert flags["decoder.layers.1.mlp.router.weight"] == (True, False)
    assert flags["decoder.final_layernorm.weight"] == (True, False)
    assert flags["decoder.layers.0.mlp.linear_fc1.weight"] == (False, True)
    # With etp 1 the two ranks hold data parallel copies of the experts, not tensor parallel ones.
    assert flags["decoder.layers.1.mlp.experts.0.linear_fc1.weight"] == (False, True)


def _refusals() -> list[str]:
    from dataclasses import replace

    from megatron_ext.params import Placement
    from megatron_ext.params.checks import check_chunk
    from megatron_ext.params.view import match_chunk

    messages = []

    def refused(call: Any) -> None:
        with pytest.raises(ParamsError) as error:
            call()
        messages.append(str(error.value))

    start_cpu("fake", 0, 2)
    (model,) = build_gpt(tp=2, num_layers=2, gated_linear_unit=True)
    view = ParameterView.from_model([model])

    # Same local shapes, other meaning: one block instead of gate and up.
    ungated = replace(view.shape, gated_linear_unit=False, ffn_hidden_size=2 * view.shape.ffn_hidden_size)
    fc2 = "decoder.layers.0.mlp.linear_fc2.weight"
    placement = Placement(ungated, view.layout)
    parameters = [(name, p) for name, p in model.named_parameters() if "linear_fc2.weight" not in name]
    shapes = [(name, p) for name, p in parameters]
    refused(lambda: match_chunk(placement, view.place, 0, shapes, []))
    wide = [
        (name, torch.empty(32, 128) if "linear_fc2.weight" in name else p)
        for name, p in model.named_parameters()
    ]
    entries, _ = match_chunk(placement, view.place, 0, wide, [])
    refused(lambda: check_chunk(model, placement, entries, model.pg_collection))

    refused(lambda: match_chunk(view.placement, view.place, 0, [(fc2, torch.empty(1, 2))], []))
    model.decoder.layers[1].extra = torch.nn.Parameter(torch.zeros(1))
    refused(lambda: ParameterView.from_model([model]))
    refused(lambda: ParameterView.from_model([torch.nn.Linear(2, 2)]))
    model.config.mla_down_proj_fusion = True
    refused(lambda: ParameterView.from_model([model]))
    return messages


def test_what_does_not_match_is_refused_with_the_tensors_name() -> None:
    ((missing, other_cut, other_shape, unknown, no_gpt, options),) = run_ranks(_refusals, 1)
    assert missing == "chunk 0 lacks decoder.layers.0.mlp.linear_fc2.weight and 1 more tensors"
    assert other_cut.startswith(
        "decoder.layers.0.mlp.linear_fc1.weight: this view and sharded_state_dict disagree"
    )
    assert "has shape (1, 2), expected (32, 64) of the global (32, 128)" in other_shape
    assert "parameter decoder.layers.1.extra of chunk 0" in unknown
    assert "the model is a Linear" in no_gpt
    assert options.endswith("mla_down_proj_fusion (multi-latent attention with fused down projections)")
