# SPDX-License-Identifier: Apache-2.0
"""The SPES scripts begin at a mixture that was made of a dense model, by variables of theirs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.convert.upcycle import upcycle
from megatron_ext.convert.upcycle_config import UpcycleConfig
from tests.examples.desk import Desk
from tests.support.distributed import REPOSITORY

NODE = REPOSITORY / "examples/spes/run_single_node.sh"
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""What the toy's sizes are, in the layout of the released 9B's dense model."""

LIKE_9B = (
    "--position-embedding-type rope --qk-layernorm --norm-epsilon 1e-6 --group-query-attention --num-query-groups 2 "
    "--rotary-base 1000000 --untie-embeddings-and-output-weights"
)
"""What the toy lacks of the 9B."""


@pytest.mark.slow
def test_a_node_begins_at_an_upcycled_mixture(desk: Desk, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3Config(**TOY, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    start = from_hf(tmp_path / "dense", tmp_path / "start", divisor=128).folder
    mixture = upcycle(start, tmp_path / "mixture", UpcycleConfig(noise_std=0.01, untie_embeddings=True)).folder
    code, output = desk.run(
        NODE,
        ["0"],
        MODEL="9b",
        MODE="centralized",
        BACKEND="cpu",
        TRAIN_ITERS="1",
        OUTPUT=str(tmp_path / "run"),
        # A step that changes nothing, so that the end tells the begin.
        EXTRA_ARGS=f"{LIKE_9B} --load {mixture} --lr 0 --min-lr 0",
    )
    assert code == 0, output
    assert "successfully loaded checkpoint" in output
    found = []
    for source in (mixture, tmp_path / "run" / "node0"):
        target = tmp_path / f"{source.name}.hf"
        to_hf(ToHf(source=source, target=target, vocab_size=258))
        found.append(load_file(target / "model.safetensors"))
    assert found[0].keys() == found[1].keys() and "lm_head.weight" in found[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert json.loads((tmp_path / "node0.hf" / "config.json").read_text())["num_experts"] == 8
