# SPDX-License-Identifier: Apache-2.0
"""The command on lines of all kinds: what is refused, and what is said of jobs that no machine here could run."""

import json
import re
import shlex
from functools import cache

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.explain.config import ExplainConfig
from megatron_ext.explain.units import gigabytes
from tests.explain.commands import given, run_all
from tests.support.distributed import REPOSITORY
from tests.support.presets import MOE, PRECISIONS, TOY_GPT, toy_gpt

LLAMA_LIKE = toy_gpt(
    num_layers=5,
    ffn_hidden_size=160,
    swiglu=True,
    disable_bias_linear=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    global_batch_size=64,
    bf16=True,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    sequence_parallel=True,
    recompute_granularity="selective",
    # The defaults for GPUs: Transformer Engine and fused kernels.
    **dict.fromkeys(name for name in TOY_GPT if name.startswith(("no_", "transformer_impl", "attention_backend"))),
)


def example() -> list[str]:
    """Return the example of the page about the command."""
    page = (REPOSITORY / "docs/explain.md").read_text(encoding="utf-8")
    command = shlex.split(page.split("```bash")[1].split("```")[0].replace("\\\n", " "))
    assert command[:2] == ["megatron-ext", "explain"]
    return command[2:]


EVALUATION = ("--eval-interval", "10")
COMMANDS = {
    "unknown option": [*given(4), "--", *toy_gpt(), "--no-such-option"],
    "a feature's rule": [*given(4), "--", *toy_gpt(use_local_sgd=True, local_sgd_workers=3)],
    "Megatron's rule": [*given(4), "--", *toy_gpt(save="nowhere")],
    "a rule without words": [*given(3), "--", *toy_gpt(tensor_model_parallel_size=2)],
    "a required flag": [*given(1), "--", "--num-layers", "4", "--hidden-size", "64", *EVALUATION],
    "launcher": [
        *("--backend", "cpu", "--json", "torchrun", "--nproc_per_node", "2", "--nnodes=2", "--rdzv-id", "x"),
        *("examples/pretrain_gpt.py", *toy_gpt(global_batch_size=8)),
    ],
    "FSDP": [*given(2), "--", *toy_gpt(PRECISIONS["fp32-fsdp2"])],
    "many workers": [
        *("--nproc-per-node", "8", "--nnodes", "8", "--", "pretrain_gpt.py", *LLAMA_LIKE),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--context-parallel-size", "2"),
        *("--decoder-first-pipeline-num-layers", "2", "--use-local-sgd", "--local-sgd-workers", "8"),
        *("--local-sgd-sync-interval", "50", "--local-sgd-codec", "int8", "--local-sgd-cpu-offload"),
    ],
    "strategies": [
        *("--nproc-per-node", "8", "--", *LLAMA_LIKE, "--num-layers", "4"),
        *("--hot-switch-strategies", "1,4,2", "4,2,1", "8,1,1", "--hot-switch-bucket-sizes", "32", "16", "8", "0"),
    ],
    "the page's example": example(),
    "experts": [*given(2), "--", *toy_gpt(MOE, expert_model_parallel_size=2)],
}


@cache
def outcomes() -> dict[str, tuple[int, str, str]]:
    return dict(zip(COMMANDS, run_all(list(COMMANDS.values())), strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown option", "unrecognized arguments: --no-such-option"),
        ("a feature's rule", "--local-sgd-workers"),
        ("Megatron's rule", "args.save_interval is not None does not hold; give --save-interval (arguments.py:"),
        ("a required flag", "args.micro_batch_size is not None does not hold; give --micro-batch-size (arguments.py:"),
        ("a rule without words", "world size (3)"),
        ("FSDP", "--use-torch-fsdp2: the arguments are valid, but ranks with FSDP cannot be built"),
    ],
)
def test_what_a_run_would_refuse_is_refused_in_one_line(name: str, said: str):
    code, output, errors = outcomes()[name]
    assert code == 2
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("megatron-ext: error: ")
    assert said in errors


def test_a_job_of_any_size_is_explained_without_its_gpus():
    code, output, errors = outcomes()["many workers"]
    assert code == 0, errors
    lines = output.splitlines()
    assert lines[0] == "valid: 64 ranks, TP 2, PP 2, CP 2, EP 1, DP 8; local-sgd"
    assert lines[1].startswith("8 workers of 8 ranks: worker 0: ranks 0-3, 32-35; worker 1: ranks 4-7, 36-39; ")
    assert "worker 7: ranks 28-31, 60-63" in lines[1]
    assert lines[4].startswith("8 workers meet every 50 steps; outer optimizer sgd, values travel as int8")
    # Two stages of unlike sizes; anchors are on the host.
    assert "memory of rank 32, stage 1 of 2, the fullest" in lines
    assert any(line.startswith("  rank 0, stage 0 of 2: ") for line in lines)
    assert any(line.startswith("  anchor of local SGD (host)") for line in lines)
    assert any(line.startswith("  activations") and " ~ " in line for line in lines)
    # Of 4 micro-batches, 3 layers and 16 x 2 positions: 4 heads of 8 keys and 8 values, 3 times, on 2 ranks, in bf16.
    (exchanged,) = (line for line in lines if line.startswith("  per step: keys and values (context parallel, CP 2)"))
    assert gigabytes(4 * 3 * 32 * 3 * 4 * (8 + 8) // 2 * 2) in exchanged
    assert not [line for line in lines if "cpu" in line.lower() and "patches" in line]


def test_the_strategies_of_hot_switching_are_told_with_their_ranks_and_what_guests_need():
    code, output, errors = outcomes()["strategies"]
    assert code == 0, errors
    ranks = "1 replica, the first on ranks of stage 0: 0-3; stage 1: 4-7"
    assert f"home 1,4,2 (DP,TP,PP), lengths 17 to 32: {ranks}" in output
    assert "guest 8,1,1 (DP,TP,PP), lengths 9 to 16: 8 replicas, the first on ranks of stage 0: 0\n" in output
    # The guest with one rank per replica has the whole model: every parameter, and an fp32 gradient of it.
    total = int(re.search(r"^([\d,]+) parameters", output, re.MULTILINE)[1].replace(",", ""))
    lines = output.splitlines()
    (weights,) = (line for line in lines if line.startswith("  weights of the largest guest"))
    assert weights.endswith(gigabytes(2 * total))
    (gradients,) = (line for line in lines if line.startswith("  gradients of the largest guest"))
    assert gradients.endswith(gigabytes(4 * total))


def test_the_example_of_the_page_is_valid():
    code, output, errors = outcomes()["the page's example"]
    assert code == 0, errors
    assert output.startswith("valid: 4 ranks, TP 2, PP 1, CP 1, EP 1, DP 2; local-sgd\n")


def test_all_of_it_fits_a_screen():
    assert len(outcomes()["many workers"][1].splitlines()) < 50


def test_of_a_mixture_what_a_token_meets_is_told_apart():
    code, output, errors = outcomes()["experts"]
    assert code == 0, errors
    # 2 layers of 4 experts, of which 2 are used: 2 x 2 x (32 x 128 + 128 + 128 x 32 + 32) elements less.
    (line,) = [line for line in output.splitlines() if "of which a token meets" in line]
    total, active, _ = (int(number) for number in re.findall(r"\d+", line.replace(",", "")))
    assert total - active == 2 * 2 * (32 * 128 + 128 + 128 * 32 + 32)
    # Of 2 x 32 positions, 2 layers keep 18 h and of 2 experts each 4 x 128 and 2 h; the rest is what the formula adds.
    (line,) = [line for line in output.splitlines() if line.startswith("  activations ")]
    layers = 2 * 32 * 2 * (18 * 32 + 2 * (4 * 128 + 2 * 32))
    outside = 2 * 32 * (8 + 32 + 4 * (32 + 128))
    assert line.endswith(gigabytes(layers + outside))


def test_a_job_without_ranks_and_a_rank_outside_of_it_are_refused():
    with pytest.raises(UserError, match="--nnodes is 0; give at least 1"):
        ExplainConfig(words=[], nnodes=0).check()
    with pytest.raises(UserError, match="--rank is 8; the job has ranks 0 to 7"):
        ExplainConfig(words=[], nproc_per_node=8, rank=8).check()


def test_a_line_with_its_launcher_is_explained_as_that_would_start_it() -> None:
    code, output, errors = outcomes()["launcher"]
    assert code == 0, errors
    assert json.loads(output)["job"]["sizes"]["world"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-layers", "4"], "unrecognized arguments: --num-layers; what Megatron gets comes after --, as in"),
        (["--", "torchrun", "--nnodes", "2"], "torchrun: what Megatron gets follows a training script, and no word"),
        (["torchrun", "--nproc-per-node", "gpu", "a.py"], "--nproc-per-node gpu: is not a number of ranks or nodes"),
        (["torchrun", "--nnodes=1:4", "a.py"], "--nnodes 1:4: is not a number of ranks or nodes to explain; give one"),
    ],
)
def test_lines_that_megatron_would_not_get_are_told_how(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        code = main(["explain", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err


def test_outer_steps_of_one_worker_are_told_with_what_a_checkpoint_holds_of_them() -> None:
    options = toy_gpt(use_local_sgd=True, local_sgd_workers=1, local_sgd_sync_interval=30, outer_optimizer_lr=0.7)
    ((code, out, _),) = run_all([[*given(1), "--", *options]])
    assert code == 0
    assert "one worker makes an outer step every 30 steps; outer optimizer sgd" in out
    assert "anchor and outer optimizer (fp32)" in out and "of the other" not in out
