# SPDX-License-Identifier: Apache-2.0
"""The options that the support table calls tested on CPU do their work there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backends.runs import losses, stock
from tests.options.test_parser import newest
from tests.support.distributed import REPOSITORY, SINGLE_THREADED
from tests.support.heterogeneous import heterogeneous
from tests.support.megatron_checkout import python_path
from tests.support.presets import LAYOUTS, MOE, PRECISIONS, Options, command_line, toy_gpt
from tests.support.pretrain import run_pretrain

WATCHING: Options = {
    "check_weight_hash_across_dp_replicas_interval": 1,
    "exit_signal_handler": True,
    "exit_duration_in_mins": 60,
    "log_straggler": True,
}

BUCKETS: Options = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_num_buckets": 3,
    "ddp_pad_buckets_for_high_nccl_busbw": True,
    "no_align_grad_reduce": True,
    "no_align_param_gather": True,
}


@pytest.fixture(scope="module")
def plain():
    """Losses of two data-parallel ranks in fp32 with the distributed optimizer."""
    return losses(stock(toy_gpt(PRECISIONS["fp32-distopt"]), 2))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**WATCHING, "calculate_per_token_loss": True}, id="watching"),
        pytest.param({"ddp_average_in_collective": True, "disable_gloo_process_groups": True}, id="average"),
        pytest.param(BUCKETS, id="buckets"),
    ],
)
def test_options_that_change_no_result(options, plain):
    ranks = stock(toy_gpt(PRECISIONS["fp32-distopt"], options), 2)
    assert losses(ranks) == pytest.approx(plain, rel=1e-6)


@newest
def test_options_that_megatron_ignores_change_no_bit():
    read = {"position_embedding_type": "rope", "no_rope_fusion": True, "use_rope_scaling": True}
    read |= {"rotary_base": 1000000, "use_mup": True, "mup_base_hidden_size": 16}
    ignored = {"rope_scaling_factor": 2.0, "mup_width_mult": 3.0, "qk_l2_norm": True}
    ignored |= {"openai_gelu": True, "apply_residual_connection_post_layernorm": True}
    with_them, without = (stock(toy_gpt(read, options), 1) for options in (ignored, {}))
    assert with_them[0].parameters == without[0].parameters


def test_gradients_reduced_in_bf16_and_summed_in_fp32(plain):
    options = {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True}
    ranks = stock(toy_gpt(PRECISIONS["bf16-distopt"], options), 2)
    assert losses(ranks) == pytest.approx(plain, rel=1e-2)
    assert losses(ranks) != pytest.approx(plain, rel=1e-6)


def test_random_weights_per_replica_are_made_equal():
    ranks = stock(toy_gpt(data_parallel_random_init=True), 2)
    assert ranks[0].parameters == ranks[1].parameters


def test_skipped_iterations_train_nothing():
    ranks = stock(toy_gpt(iterations_to_skip=[2, 3]), 2)
    assert [step.iteration for step in ranks[0].record.steps] == [1, 4]


def test_the_batch_grows():
    # Thresholds are in tokens, 32 to a sample.
    options: Options = {"step_batch_size_schedule": "0:4 256:8 512:12", "global_batch_size": None}
    ranks = stock(toy_gpt(options, train_iters=None, train_samples=40, lr_decay_samples=40), 2)
    batches = [int(size) for size in re.findall(r"global batch size: +(\d+) \|", ranks[-1].stdout)]
    assert len(batches) == len(ranks[0].record.steps)
    assert batches == sorted(batches)
    assert set(batches) == {4, 8, 12}


def test_sgd_learns():
    ranks = stock(toy_gpt(optimizer="sgd", lr=0.1, train_iters=6), 2)
    assert losses(ranks)[-1] < losses(ranks)[0]
    assert ranks[0].parameters == ranks[1].parameters


def test_multi_token_prediction():
    options = {"mtp_num_layers": 1, "position_embedding_type": "rope", "no_rope_fusion": True}
    ranks = stock(toy_gpt(options, LAYOUTS["pp2"].options), 2)
    assert losses(ranks) == sorted(losses(ranks), reverse=True)
    assert any("mtp." in name for name in ranks[1].parameters[0])
    assert not any("mtp." in name for name in ranks[0].parameters[0])


@newest
def test_layers_of_different_kinds(tmp_path):
    ranks = stock(toy_gpt(heterogeneous(tmp_path), lr=1e-2), 1)
    assert losses(ranks) == sorted(losses(ranks), reverse=True)
    names = "\n".join(ranks[0].parameters[0])
    assert "layers.0.self_attention.linear_qkv" in names and "layers.1.self_attention.linear_qkv" not in names
    assert "layers.1.mlp.linear_fc1" in names


def test_routers_that_balance_by_quantiles():
    options = {**MOE, "moe_router_load_balancing_type": "quantile_balancing", "disable_bias_linear": True}
    ranks = stock(toy_gpt(options, lr=1e-2), 2)
    assert losses(ranks) == sorted(losses(ranks), reverse=True)
    assert losses(ranks) != losses(stock(toy_gpt({**options, "moe_router_load_balancing_type": "none"}, lr=1e-2), 2))


@pytest.mark.slow
def test_non_persistent_checkpoints_replace_each_other(tmp_path):
    """Also: the example script under torchrun, without a word about the backend."""
    options = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 127,
        "micro_batch_size": 2,
        "train_iters": 5,
        "lr": 1e-3,
        "eval_iters": 0,
        "eval_interval": 100,
        "save": os.fspath(tmp_path),
        "save_interval": 4,
        "non_persistent_ckpt_type": "global",
        "non_persistent_save_interval": 1,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*torchrun, os.fspath(Path(REPOSITORY) / "examples/pretrain_gpt.py"), *command_line(options)],
        env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": python_path(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("> megatron_ext: ") == 1
    assert done.stdout.count("> megatron_ext: no CUDA device was found, training runs on CPU with gloo\n") == 1
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000005"]


def test_dumps_have_every_parameter(tmp_path):
    options = {"save_params_interval": 2, "save_wgrads_interval": 2, "train_iters": 2, "save_interval": 100}
    run_pretrain(toy_gpt(save=os.fspath(tmp_path), **options), 1, probe=None, patch="backend-only")
    found = {path.parts[-3]: torch.load(path)["model_chunk0"] for path in tmp_path.rglob("*.pth")}
    assert set(found) == {"params", "wgrads"}
    assert found["params"].keys() == found["wgrads"].keys() and len(found["params"]) > 20
    assert all(found["params"][name].shape == found["wgrads"][name].shape for name in found["params"])
