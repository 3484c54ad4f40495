# SPDX-License-Identifier: Apache-2.0
"""What a ``config.json`` means in Megatron's words, and what is refused by name."""

import math
from contextlib import suppress
from typing import Any

import pytest

from megatron_ext.convert import megatron_args
from megatron_ext.convert.families import FAMILIES, family_for, family_named, read_config, write_config
from megatron_ext.convert.flags import flags_of, settings_of
from megatron_ext.convert.megatron_args import checkpoint_args, command_line
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError

DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISSING = object()
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": {**DENSE, "head_dim": 32},
    "mixtral": {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**DENSE, **EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
    "qwen2_moe": {**DENSE, **EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    "olmoe": {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "deepseek_v3": {**DENSE, **LATENT},
    "deepseek_v2": {**DENSE, **LATENT, "topk_method": "group_limited_greedy", "topk_group": 3},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_survives_both_directions_and_megatrons_arguments(name: str):
    settings = read_config(family_named(name), CONFIGS[name])
    family, written = family_for(settings)
    assert (family.model_type, read_config(family, written)) == (name, settings)
    assert settings_of(checkpoint_args(settings, 300)) == settings


def test_flags_are_those_that_make_the_model():
    flags = flags_of(read_config(family_named("deepseek_v3"), CONFIGS["deepseek_v3"]))
    assert " ".join(flags) == (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--multi-latent-attention --qk-head-dim 16 --rope-type rope --moe-layer-freq [0,1] --num-layers 2 "
        "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16 "
        "--max-position-embeddings 128 --norm-epsilon 1e-06 --rotary-base 1000000 --qk-layernorm --num-experts 8 "
        "--moe-ffn-hidden-size 32 --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-shared-expert-intermediate-size 64 --kv-lora-rank 16 --q-lora-rank 24 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --attention-dropout 0.0 --hidden-dropout 0.0"
    )


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3", "factor": 4.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "rope_type": "llama3", "factor": 4.0}},
    ],
)
def test_rotary_settings_are_read_as_former_and_current_releases_write_them(rotary: dict[str, Any]):
    config = {key: value for key, value in DENSE.items() if key != "rope_theta"}
    settings = read_config(family_named("llama"), {**config, **rotary})
    assert (settings.rotary_base, settings.use_rope_scaling, settings.rope_scaling_factor) == (500000, True, 4.0)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"no_such_field": 1}, "no_such_field (1) has no counterpart"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_dropout": 1.5}, "attention_dropout is 1.5, not a number from 0 to below 1"),
        ("llama", {"attention_dropout": "no"}, "attention_dropout is 'no', not a number from 0 to below 1"),
        ("llama", {"attention_bias": True}, "attention_bias and mlp_bias differ"),
        ("llama", {"rope_theta": 10000.5}, "--rotary-base is a whole number"),
        *(
            (family, {"rope_scaling": {"type": kind, "factor": 2.0}}, f"of type {kind!r}, and only {converts} converts")
            for kind, family, converts in [
                ("dynamic", "llama", "default or llama3"),
                ("linear", "qwen3", "default or llama3"),
                ("yarn", "llama", "default or llama3"),
                ("yarn", "qwen3_moe", "default or llama3"),
                ("llama3", "deepseek_v2", "default or yarn"),
                ("llama3", "deepseek_v3", "default or yarn"),
            ]
        ),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 2}}, "low_freq_factor is 2"),
        ("llama", {"rope_parameters": 3}, "rope_parameters is 3, not an object"),
        ("llama", {"rope_theta": "x"}, "rope_theta is 'x', not a number"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1, not a number above 0"),
        ("llama", {"rope_scaling": {"type": "llama3"}}, "rope_scaling.factor is missing; write down what"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": "a"}}, "rope_scaling.factor is 'a', not a number above 0"),
        ("llama", {"rope_scaling": {"type": "llama3", "new": 2}}, "rope_scaling.new (2) has no counterpart"),
        ("llama", {"hidden_size": 0}, "hidden_size is 0, not a whole number"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers is None"),
        ("mixtral", {"rms_norm_eps": MISSING}, "rms_norm_eps is missing; write down what the model was trained with"),
        ("llama", {"num_key_value_heads": MISSING}, "num_key_value_heads is missing"),
        ("llama", {"rope_theta": MISSING}, "rope_theta is missing"),
        ("qwen3", {"head_dim": MISSING}, "head_dim is missing"),
        ("deepseek_v3", {"n_group": MISSING}, "n_group is missing"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "a window of 64"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, and only 1e-06"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"q_lora_rank": MISSING}, "q_lora_rank is missing"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek_v2", {"topk_group": 2}, "num_experts_per_tok is 4 and topk_group 2: Megatron chooses groups by"),
        ("deepseek_v3", {"num_experts_per_tok": 8}, "by their best 4 scores"),
        ("deepseek_v3", {"topk_group": 0}, "n_group and topk_group are 4, 4 and 0"),
    ],
)
def test_what_does_not_convert_is_named(family: str, change: dict[str, Any], said: str):
    with pytest.raises(UserError) as refused:
        config = {key: value for key, value in {**CONFIGS[family], **change}.items() if value is not MISSING}
        read_config(family_named(family), config)
    assert said in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_any_wrong_type_is_one_line_and_no_traceback(family: str):
    names = {*CONFIGS[family], "rope_scaling", "rope_parameters", "tie_word_embeddings", "layer_types"}
    names |= {"decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "routed_scaling_factor"}
    for name in sorted(names):
        for value in ("x", [], [1], {}, {"factor": "a"}, {"rope_type": 3}, 0, -1, True, 3.5, math.nan, math.inf):
            with suppress(UserError):  # a refusal is as good here as a value that converts; nothing else may be raised
                read_config(family_named(family), {**CONFIGS[family], name: value})


def test_all_that_does_not_convert_is_named_at_once_and_fields_can_be_ignored():
    config = {**DENSE, "one": 1, "two": 2, "hidden_act": "gelu"}
    with pytest.raises(UserError, match=r"hidden_act.*one.*two.*--ignore NAME"):
        read_config(family_named("llama"), config)
    config["hidden_act"] = "silu"
    assert read_config(family_named("llama"), config, ["one", "two"]) == read_config(family_named("llama"), DENSE)


@pytest.mark.parametrize("name", ["gpt2", None, ["llama"]])
def test_an_unknown_family_is_refused_with_those_that_there_are(name: Any):
    with pytest.raises(UserError, match=r"what converts is llama, qwen2, .*deepseek_v3"):
        family_named(name)


def test_a_model_that_no_family_can_say_is_refused_with_the_nearest_ones_reason():
    settings = read_config(family_named("qwen3"), CONFIGS["qwen3"])
    mixed = ModelSettings(**{**vars(settings), "add_qkv_bias": True})
    with pytest.raises(UserError, match="a qwen2 model cannot be what this one is: qk_layernorm"):
        family_for(mixed)
    with pytest.raises(UserError, match=r"a llama model cannot be what this one is: qk_layernorm is True"):
        write_config(family_named("llama"), settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("squared_relu", True),
        ("mtp_use_repeated_layer", True),
        ("window_size", [64, 0]),
        ("moe_router_load_balancing_type", ["sinkhorn"]),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("spec", ["mine", "layers"]),
    ],
)
def test_arguments_without_a_counterpart_are_named(name: str, value: Any):
    args = checkpoint_args(read_config(family_named("mixtral"), CONFIGS["mixtral"]), 300)
    setattr(args, name, value)
    with pytest.raises(UserError, match=rf"{name} is .*{str(value).strip("[']").split(',')[0].strip("'")}"):
        settings_of(args)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_has_the_dropout_and_the_balancing_of_the_configuration_both_ways(name: str):
    family = family_named(name)
    latent = name.startswith("deepseek")
    change = {"attention_dropout": 0.25, **({"aux_loss_alpha": 0.5, "seq_aux": True} if latent else {})}
    settings = read_config(family, {**CONFIGS[name], **change})
    flags = " ".join(flags_of(settings))
    # Megatron's own defaults are 0.1 for both.
    assert "--attention-dropout 0.25 --hidden-dropout 0.0" in flags
    assert ("--moe-router-load-balancing-type seq_aux_loss" in flags) == latent
    args = checkpoint_args(settings, 300)
    assert (args.attention_dropout, args.hidden_dropout) == (0.25, 0.0)
    assert write_config(family, settings_of(args)).items() >= change.items()
    if latent:
        over_all = read_config(family, {**CONFIGS[name], **change, "seq_aux": False})
        assert "--moe-router-load-balancing-type" not in flags_of(over_all)


def test_a_checkpoints_hidden_dropout_stays_with_the_flags_of_a_mixture_made_of_it():
    args = checkpoint_args(read_config(family_named("llama"), DENSE), 300)
    args.hidden_dropout = 0.1
    assert "--hidden-dropout 0.1" in " ".join(flags_of(settings_of(args)))


def test_megatrons_list_of_balancing_weights_becomes_the_one_that_a_family_has():
    args = checkpoint_args(read_config(family_named("mixtral"), CONFIGS["mixtral"]), 300)
    args.moe_aux_loss_coeff = [0.01]
    assert family_for(settings_of(args))[1]["router_aux_loss_coef"] == 0.01


def settings_without_an_option(name: str, **fields: Any) -> ModelSettings:
    """Return a model whose layers are for Megatron's ``--spec``."""
    return read_config(family_named(name), {**CONFIGS[name], **fields})


def test_layers_without_an_option_are_named_by_the_flags_and_by_the_checkpoint():
    for settings, layers in [
        (settings_without_an_option("olmoe"), "norms_over_heads"),
        (settings_without_an_option("deepseek_v3", q_lora_rank=None), "plain_queries"),
    ]:
        flags = flags_of(settings)
        at = flags.index("--spec")
        assert flags[at + 1 : at + 3] == checkpoint_args(settings, 300).spec == ["megatron_ext.layer_specs", layers]
        assert command_line(settings) == flags
    assert checkpoint_args(settings_without_an_option("deepseek_v3"), 300).spec is None


def test_a_megatron_without_these_layers_gets_its_own_or_refuses_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_args, "find_spec", lambda name: None)
    unprojected = settings_without_an_option("deepseek_v3", q_lora_rank=None)
    assert "--spec" not in command_line(unprojected)
    assert len(command_line(unprojected)) == len(flags_of(unprojected)) - 3
    with pytest.raises(UserError, match=r"norms over all heads at once .* needs Megatron-core 0\.19 or later"):
        command_line(settings_without_an_option("olmoe"))
