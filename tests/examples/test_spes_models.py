# SPDX-License-Identifier: Apache-2.0
"""MODEL of the SPES scripts: sizes, rules and schedules of the models that SPES has released."""

import importlib.util
from typing import Any

import pytest

from megatron_ext.convert.families import family_for, family_named, read_config
from megatron_ext.convert.flags import settings_of
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.convert.upcycle_config import UpcycleConfig
from tests.examples.desk import RECORD_ARGUMENTS, Desk, split_at_script, validated
from tests.support.distributed import REPOSITORY, run_ranks

NODE = REPOSITORY / "examples/spes/run_single_node.sh"

QWEN_TOKENS = 151_665
"""In the tokenizer of Qwen2.5, which the released models have."""

SAME = {
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_aux_loss_coeff": [0.01],
    "moe_z_loss_coeff": 0.001,
    "moe_expert_capacity_factor": None,
    "weight_decay": 0.1,
    "apply_wd_to_qk_layernorm": True,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "lr_decay_style": "cosine",
    "bf16": True,
}
OWN = ("moe_router_pre_softmax", "seq_length", "rotary_base", "lr", "lr_warmup_iters", "lr_decay_iters", "train_iters")


QWEN3_1_7B = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
"""The dense model that the released 9B began with."""


def look(arguments: list[str]) -> tuple[dict[str, Any], list[int], int, ModelSettings]:
    """Return what a node asks for.

    Its options, the parameters (all, those of a token, a peer's), the rows of the embedding, and the model that
    conversions see.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training.global_vars import set_args

    from megatron_ext.spes.arguments import ownership_of

    args = validated(arguments, 8)
    asked = {name: getattr(args, name) for name in (*SAME, *OWN)}
    asked["lr_to_min_lr"] = round(args.lr / args.min_lr, 6)
    padded = vocab_size_with_padding(QWEN_TOKENS, args)
    # What has no rows of its own on a machine without a GPU and Transformer Engine; it changes no size.
    args.padded_vocab_size = padded
    args.transformer_impl, args.no_persist_layer_norm, args.use_cpu_initialization = "local", True, True
    args.gradient_accumulation_fusion = args.bias_swiglu_fusion = args.apply_rope_fusion = False
    args.masked_softmax_fusion = args.perform_initialization = False
    set_args(args)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    spec = importlib.util.spec_from_file_location("gpt_provider", REPOSITORY / "examples/gpt_provider.py")
    assert spec is not None and spec.loader is not None
    provider = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(provider)
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in provider.build_gpt().named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    ownership = ownership_of(args)
    assert ownership is not None
    owned = len(ownership.owned_by(args.sync_service_index))
    shared = total - experts
    parts = [shared + experts * count // args.num_experts for count in (args.moe_router_topk, owned)]
    return asked, [total, *parts], padded, settings_of(args, padded)


@pytest.mark.parametrize(
    ("model", "own", "billions", "rows"),
    [
        ("1b", (True, 2048, 500_000, 5e-4, 2000, None, 50_000), (1.17, 0.37, 0.49), 151_680),
        ("7b", (True, 2048, 32_000, 4e-4, 2000, None, 500_000), (7.33, 1.70, 2.50), 151_680),
        # Released with a schedule that ends before its steps do; its embedding has the rows of Qwen3's.
        ("9b", (False, 4096, 1_000_000, 1e-4, 1000, 100_000, 200_000), (9.43, 3.09, 3.09), 151_936),
    ],
)
def test_a_model_has_the_size_the_rules_and_the_schedule_of_the_released_one(
    desk: Desk, model: str, own: tuple[object, ...], billions: tuple[float, ...], rows: int
) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    code, output = desk.run(NODE, ["0"], RECORDED_ARGUMENTS=str(recorded), OUTPUT=str(desk.folder), MODEL=model)
    assert code == 0, output
    _, training = split_at_script(recorded.read_text().splitlines())
    ((asked, counts, padded, settings),) = run_ranks(look, 1, training)
    coefficient = asked["moe_aux_loss_coeff"]
    asked["moe_aux_loss_coeff"] = coefficient if isinstance(coefficient, list) else [coefficient]
    assert asked == {**SAME, **dict(zip(OWN, own, strict=True)), "lr_to_min_lr": 10.0}
    assert tuple(round(count / 1e9, 2) for count in counts) == pytest.approx(billions, abs=0.011)
    assert padded == rows
    if model == "9b":
        # What `upcycle --untie-embeddings` makes of the dense model can be loaded, and computes the same.
        dense = read_config(family_named("qwen3"), QWEN3_1_7B)
        begun = UpcycleConfig(untie_embeddings=True).settings(dense)
        assert settings.differences(begun) == {"max_position_embeddings": (4096, 40_960)}
        assert settings.differences(UpcycleConfig().settings(dense)).keys() >= {"untie_embeddings_and_output_weights"}


def test_a_run_of_another_length_decays_over_all_of_it(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    environment = {"RECORDED_ARGUMENTS": str(recorded), "OUTPUT": str(desk.folder)}
    code, output = desk.run(NODE, ["0"], TRAIN_ITERS="5000", **environment)
    assert code == 0, output
    words = recorded.read_text().splitlines()
    assert words[words.index("--train-iters") + 1] == "5000" and "--lr-decay-iters" not in words


def family_of(arguments: list[str]) -> str:
    """Return which family of Hugging Face can say all of what a run at toy size trains."""
    family, _ = family_for(settings_of(validated(arguments, 1), 257))
    return family.model_type


def test_a_toy_peer_can_become_a_hugging_face_model(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    code, output = desk.run(NODE, ["0"], RECORDED_ARGUMENTS=str(recorded), OUTPUT=str(desk.folder), BACKEND="cpu")
    assert code == 0, output
    assert run_ranks(family_of, 1, split_at_script(recorded.read_text().splitlines())[1]) == ["mixtral"]
