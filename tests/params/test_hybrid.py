# SPDX-License-Identifier: Apache-2.0
"""Tensors of hybrid models; tests/local_sgd/test_hybrid_models.py holds them against Megatron's live models."""

import pytest
import torch

from megatron_ext.params import GptShape, Layout, ParamsError, Placement, gather, global_name, gpt_parameters, scatter
from megatron_ext.params.hybrid_pattern import kinds_of_pattern, stages_of_pattern
from megatron_ext.params.parameter_names import checkpoint_key
from megatron_ext.params.state_space import StateSpace
from tests.params.models import full_values

SIZES = StateSpace(heads=4, head_dim=2, groups=2, state_dim=3)
TINY = GptShape(
    num_layers=4,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=4,
    padded_vocab_size=8,
    add_bias_linear=False,
    normalization="RMSNorm",
    num_moe_experts=2,
    layer_kinds=("state_space", "attention", "mlp", "experts"),
    moe_layers=(False, False, False, True),
    state_space=SIZES,
)


def test_a_layer_has_the_tensors_of_its_kind_and_no_others() -> None:
    by_layer = {layer: set[str]() for layer in range(4)}
    for tensor in gpt_parameters(TINY):
        if tensor.layer is not None:
            by_layer[tensor.layer].add(tensor.name.removeprefix(f"decoder.layers.{tensor.layer}."))
    assert by_layer == {
        0: {
            "norm.weight",
            *(f"mixer.{name}" for name in ("dt_bias", "A_log", "D", "conv1d.weight", "conv1d.bias")),
            *(f"mixer.{name}.weight" for name in ("in_proj", "norm", "out_proj")),
        },
        1: {"input_layernorm.weight", "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"},
        2: {"pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"},
        3: {
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            *(f"mlp.experts.{expert}.linear_fc{half}.weight" for expert in (0, 1) for half in (1, 2)),
        },
    }
    assert "decoder.final_norm.weight" in {tensor.name for tensor in gpt_parameters(TINY)}


def test_a_rank_holds_its_heads_part_of_each_matrix_of_the_input_projection() -> None:
    placement = Placement(TINY, Layout(tp=2))
    values = {tensor.name: torch.zeros(tensor.shape) for tensor in placement.tensors}
    name = "decoder.layers.0.mixer.in_proj.weight"
    # 8 rows of z, 8 of x, 6 of B, 6 of C, 4 of dt.
    values[name] = torch.arange(32.0).unsqueeze(1).expand(32, 4).contiguous()
    rows = [scatter(values, placement.on_rank(rank))[name][:, 0].int().tolist() for rank in (0, 1)]
    assert rows[0] == [*range(4), *range(8, 12), *range(16, 19), *range(22, 25), 28, 29]
    assert rows[1] == [*range(4, 8), *range(12, 16), *range(19, 22), *range(25, 28), 30, 31]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, dp=2), Layout(pp=2, ep=2, dp=2, layers_per_chunk=(1, 3))], ids=["tensors", "stages"]
)
def test_values_cut_into_ranks_come_together_again(layout: Layout) -> None:
    placement = Placement(TINY, layout)
    values = full_values(placement.tensors)
    held = [placement.on_rank(rank) for rank in range(layout.world_size)]
    again = gather(placement.tensors, [(placed, scatter(values, placed)) for placed in held])
    for name, value in values.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize(
    ("local", "expected", "key"),
    [
        ("decoder.layers.0.mixer.in_proj.layer_norm_weight", "decoder.layers.2.norm.weight", None),
        ("decoder.layers.0.mixer.conv1d_bias", "decoder.layers.2.mixer.conv1d.bias", None),
        ("decoder.layers.0.mixer.conv1d.bias", "decoder.layers.2.mixer.conv1d.bias", None),
        (
            "mtp.layers.1.mtp_model_layer.layers.0.mixer.conv1d_weight",
            "mtp.layers.1.mtp_model_layer.layers.0.mixer.conv1d.weight",
            None,
        ),
        (
            "mtp.layers.1.mtp_model_layer.layers.2.mlp.experts.linear_fc1.weight1",
            "mtp.layers.1.mtp_model_layer.layers.2.mlp.experts.5.linear_fc1.weight",
            "mtp.layers.1.mtp_model_layer.layers.2.mlp.experts.experts.linear_fc1.weight",
        ),
    ],
)
def test_names_of_all_releases_mean_one_tensor(local: str, expected: str, key: str | None) -> None:
    assert global_name(local, first_layer=2, first_expert=4) == expected
    renamed = {"mixer.in_proj.layer_norm_": "norm."}
    assert checkpoint_key(local, first_layer=2, homogeneous=False, renamed=renamed) == (key or expected)


def test_a_pattern_tells_kinds_stages_and_what_predicts() -> None:
    kinds, predicting = kinds_of_pattern("M*|-E/M+/M+")
    assert kinds == ("state_space", "attention", "mlp", "experts")
    assert predicting == ("state_space", "attention")
    assert stages_of_pattern("M*|-E/M+/M+") == ["M*", "-E"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("MX", "MX: layers of the kind X"), ("M*/Y", r"M\*/Y: layers of the kind Y")],
)
def test_a_kind_of_layers_that_is_not_known_is_refused_by_name(pattern: str, said: str) -> None:
    with pytest.raises(ParamsError, match=rf"^--hybrid-layer-pattern {said} are not known here; they can be M, "):
        kinds_of_pattern(pattern)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"groups": 3}, "4 heads cannot be divided over 3 groups"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ParamsError, match=said):
        StateSpace(**{"heads": 4, "head_dim": 2, "groups": 2, "state_dim": 3, **sizes})
