# SPDX-License-Identifier: Apache-2.0
"""A configuration of SPES' own code becomes flags that Megatron and this package know, and nothing of it is lost."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.spes.official_config import flatten, translate
from tests.support.distributed import run_ranks
from tests.support.parsers import full_parser

CONFIG: dict[str, Any] = {
    "run_name": "toy",
    "seed": 6198,
    "dry_run": False,
    "using_spes": True,
    "spes_config": {
        "server_addr": "10.0.0.1:50051",
        "num_peers": 4,
        "peer_id": 2,
        "num_train_experts_per_node": 4,
        "sync_steps": 100,
    },
    "model": {
        "d_model": 768,
        "n_heads": 12,
        "n_layers": 12,
        "mlp_hidden_size": 4096,
        "rope": True,
        "rope_theta": 500000,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_layer_norm": True,
        "include_bias": False,
        "block_type": "moe",
        "layer_norm_type": "rms",
        "layer_norm_eps": "1e-6",
        "activation_type": "swiglu",
        "max_sequence_length": 2048,
        "vocab_size": 151665,
        "embedding_size": 151936,
        "init_std": 0.02,
        "moe_top_k": 2,
        "moe_num_experts": 16,
        "moe_dropless": True,
        "moe_zloss_weight": 0.001,
        "moe_loss_weight": 0.01,
    },
    "optimizer": {"name": "adamw", "learning_rate": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "scheduler": {"name": "cosine_with_warmup", "units": "steps", "t_warmup": 2000, "t_max": 50000, "alpha_f": 0.1},
    "save_folder": "output/${run_name}/node${spes_config.peer_id}",
    "save_interval": 1000,
    "stop_at": 40000,
    "max_duration": 50000,
    "global_train_batch_size": 1024,
    "device_train_microbatch_size": 4,
    "precision": "amp_bf16",
    "distributed_strategy": "fsdp",
    "activation_checkpointing": "whole_layer",
    "max_grad_norm": 1.0,
    "softmax_auxiliary_loss": True,
    "data": {"paths": ["a.npy"], "memmap_dtype": "uint32", "seed": 1, "instance_filter": {"repetition_max_count": 32}},
}


def changed(**changes: Any) -> dict[str, Any]:
    """Return the values by dotted keys with some of them changed; None removes one."""
    flat = flatten(CONFIG)
    for key, value in changes.items():
        flat[key.replace("__", ".")] = value
    return {key: value for key, value in flat.items() if value is not None}


def parsed(words: list[str]) -> dict[str, Any]:
    """Return what a run's parser makes of flags."""
    return vars(full_parser().parse_args(words))


def test_flags_are_known_and_mean_what_the_file_says():
    translation = translate(changed())
    (args,) = run_ranks(parsed, 1, list(translation.peer))
    found = {
        "hidden_size": 768,
        "ffn_hidden_size": 2048,
        "num_layers": 12,
        "rotary_base": 500000,
        "seq_length": 2048,
        "padded_vocab_size": 151936,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,
        "num_experts": 16,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": True,
        "moe_aux_loss_coeff": [0.01],  # Megatron takes one for each kind
        "moe_z_loss_coeff": 0.001,
        "lr": 5e-4,
        "min_lr": 5e-5,
        "lr_warmup_iters": 2000,
        "lr_decay_iters": 50000,
        "train_iters": 40000,
        "adam_beta2": 0.95,
        "global_batch_size": 1024,
        "micro_batch_size": 4,
        "bf16": True,
        "use_distributed_optimizer": True,
        "recompute_granularity": "full",
        "save": "output/toy/node2",
        "using_spes": True,
        "spes_num_train_experts_per_node": 4,
        "sync_service": "10.0.0.1:50051",
        "sync_service_index": 2,
        "sync_service_peers": 4,
        "sync_service_interval": 100,
        "sync_service_run": "toy",
    }
    names = {"norm_epsilon": "layernorm_epsilon"}
    assert {name: args.get(name, args.get(names.get(name, ""))) for name in found} == found
    assert " ".join(translation.server).startswith("--bind 10.0.0.1:50051 --run toy --peers 4 --sync-steps 100 --merge")


def test_what_is_different_is_said():
    notes = " ".join(translate(changed()).notes)
    for words in ("over all heads", "no z-loss on the", "--token-dtype uint32", "disjoint", "--tls-cert", "repetitive"):
        assert words in notes
    exact = " ".join(translate(changed(model__attention_layer_norm_over_head=True)).notes)
    assert "over all heads" not in exact


def test_other_forms_of_the_same_are_taken():
    ratio = translate(changed(model__mlp_hidden_size=None, model__mlp_ratio=6, model__n_kv_heads=4)).peer
    assert ratio[ratio.index("--ffn-hidden-size") + 1] == "2304" and "--group-query-attention" in ratio
    alone = translate({key: value for key, value in changed(using_spes=None).items() if "spes_config" not in key})
    assert not alone.server and not any(word.startswith(("--sync", "--using")) for word in alone.peer)
    normalized = translate(changed(model__moe_normalize_expert_weights=True)).peer
    assert "--moe-router-pre-softmax" not in normalized
    diloco = translate(changed(using_dilico=True, spes_config__num_train_experts_per_node=16))
    assert "--using-dilico" in diloco.peer and "--merge-interval" not in diloco.server


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__new_thing": 1}, "model.new_thing (1) is unknown here; --ignore model.new_thing"),
        ({"model__alibi": True}, "model.alibi is True, and only False translates"),
        ({"model__moe_dropless": False}, "model.moe_dropless is False"),
        ({"scheduler__name": "linear"}, "scheduler.name is 'linear'"),
        ({"model__mlp_hidden_size": None}, "model.mlp_hidden_size and model.mlp_ratio are missing"),
        ({"model__max_sequence_length": None}, "model.max_sequence_length is missing"),
        ({"model__residual_dropout": 0.1}, "model.residual_dropout is 0.1, model.embedding_dropout 0.0"),
        ({"stop_at": None, "max_duration": "2e12T"}, "one has to be a number of steps"),
        ({"spes_config__num_peers": 8}, "16 experts are not 8 times spes_config.num_train_experts_per_node 4; 4 fit"),
        ({"spes_config__num_peers": None}, "spes_config.num_peers is missing; --peers"),
    ],
)
def test_what_does_not_translate_is_named(changes: dict[str, Any], said: str):
    with pytest.raises(UserError) as refused:
        translate(changed(**changes))
    assert said in str(refused.value)


def test_the_command_prints_both_commands_and_takes_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    assert main(["spes", "translate-config", str(file), "spes_config.peer_id=3", "optimizer.eps=1e-8"]) == 0
    out = capsys.readouterr().out
    assert "megatron-ext server start --dir STATE_DIR --bind 10.0.0.1:50051" in out
    assert "--sync-service-index 3" in out and "--adam-eps 1e-08" in out and "different here" in out
    assert main(["spes", "translate-config", str(file), "--flags-only"]) == 0
    assert tuple(capsys.readouterr().out.split("\n")[:-1]) == translate(changed()).peer
    assert main(["spes", "translate-config", str(file), "spes_config.peer_id"]) == 2
    assert "give KEY=VALUE" in capsys.readouterr().err
    file.write_text("- a list")
    assert main(["spes", "translate-config", str(file)]) == 2
    assert "not a configuration" in capsys.readouterr().err
