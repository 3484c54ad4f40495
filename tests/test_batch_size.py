# SPDX-License-Identifier: Apache-2.0
"""Samples that cannot be dealt out, and what else Megatron's own checks say: one line that names the options."""

from types import SimpleNamespace

import pytest

from megatron_ext.batch_size import batch_size_problem, schedule_problem
from tests.hot_switch.runs import arguments as hot_arguments
from tests.local_sgd.runs import arguments as local_arguments
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain

SIZES = {
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "eval_global_batch_size": None,
    "eval_micro_batch_size": None,
    "decrease_batch_size_if_needed": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "world_size": 6,
    "hot_switch_strategies": None,
}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, None),
        ({"global_batch_size": None}, None),
        ({"world_size": 7}, None),  # Megatron names it
        (
            {"global_batch_size": 14},
            "--global-batch-size is 14, which is not a multiple of --micro-batch-size 2 times the data-parallel size 3 "
            "(world size / TP*PP*CP); give 12 or 18",
        ),
        ({"global_batch_size": 4}, "(world size / TP*PP*CP); give 6"),
        ({"global_batch_size": 14, "hot_switch_strategies": ["1,1,1"]}, None),
        (
            {"global_batch_size": 14, "decrease_batch_size_if_needed": True},
            "--eval-global-batch-size is 14 (that of --global-batch-size, unless it is given), which is not a multiple "
            "of --eval-micro-batch-size 2 times",
        ),
        ({"eval_global_batch_size": 14}, "--eval-global-batch-size is 14, which is not a multiple of"),
        ({"global_batch_size": 14, "decrease_batch_size_if_needed": True, "eval_global_batch_size": 12}, None),
        ({"eval_micro_batch_size": 5}, "--eval-global-batch-size is 12 (that of --global-batch-size, unless it is"),
    ],
    ids=["whole", "by default", "layout", "part", "below", "strategies", "evaluation", "own", "less", "own micro"],
)
def test_a_batch_that_cannot_be_dealt_out_is_refused_with_those_that_can(sizes, said):
    problem = batch_size_problem(SimpleNamespace(**{**SIZES, **sizes}))
    assert problem is None if said is None else said in problem


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (None, None),
        ("0:4 32:8", None),
        ("0:4 12:6", "thresholds must be strictly increasing, got 0 before 0; give pairs of a threshold in tokens"),
        ("32:4", "first schedule entry must have threshold 0, got 1; give pairs"),
        ("4", "Invalid schedule entry \"4\""),
        ("0:x", "could not convert"),
        ("", "at least one entry"),
        # Of 2 samples in a micro-batch and 2 replicas.
        ("0:6 1K:8", "the batch size 6 is not a multiple of --micro-batch-size 2 times the data-parallel size 2 ("),
        ("0:4 1K:6", "the batch size 6 is not a multiple of --micro-batch-size 2 times the data-parallel size 2 ("),
        ("0:2 1K:8", "(world size / TP*PP*CP); give 4"),
        ("0:4 1K:0", "; give pairs of a threshold in tokens"),
        ("0:4 1K:8 2K:4", "the batch size falls from 8 to 4, and Megatron stops where the number of micro-batches"),
        ("0:4 1K:4 2K:8", None),
    ],
)
def test_a_schedule_that_cannot_be_read_or_followed_is_refused_by_its_flag(schedule, said):
    sizes = {**SIZES, "pipeline_model_parallel_size": 1, "world_size": 2}
    problem = schedule_problem(SimpleNamespace(**sizes, step_batch_size_schedule=schedule, seq_length=32))
    assert problem is None if said is None else said in problem and "--step-batch-size-schedule" in problem


RUNS = {
    "a job": (toy_gpt(global_batch_size=7), "--global-batch-size is 7, which is not a multiple of --micro-batch-size"),
    "workers": (
        local_arguments("single", "fp32", workers=2, global_batch_size=7),
        "--global-batch-size is 7, which is not a multiple of --micro-batch-size 2 times the data-parallel size 2",
    ),
    "a schedule": (
        local_arguments(
            "single", "fp32", workers=2, global_batch_size=None, step_batch_size_schedule="0:4 2K:6"
        ),
        "--step-batch-size-schedule '0:4 2K:6': the batch size 6 is not a multiple of --micro-batch-size 2 times",
    ),
    "strategies": (
        hot_arguments(["2,1,1", "1,2,1"], [32, 12, 0], global_batch_size=7),
        "--global-batch-size is 7, which is not a multiple of home's dp 2",
    ),
    "an assertion without words": (
        toy_gpt(save="folder", non_persistent_ckpt_type="global", non_persistent_save_interval=2),
        "arguments: Megatron refuses them: args.save_interval is not None does not hold; give --save-interval",
    ),
    "an assertion with words": (
        local_arguments("single", "fp32", workers=2, mock_data=None, data_path="a", data_args_path="b"),
        "arguments: Megatron refuses them: (args.data_path is None) or (args.data_args_path is None) does not hold; "
        "change --data-path, --data-args-path",
    ),
    "a file that is not there": (
        toy_gpt(heterogeneous_layers_config_path="/nowhere/layers.json"),
        "arguments: --heterogeneous-layers-config-path /nowhere/layers.json: No such file or directory; give the",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_what_megatron_checks_itself_is_one_line_too(run):
    words, said = RUNS[run]
    exits = run_failing_pretrain(words, 2)
    assert all(rank.exit_code != 0 for rank in exits)
    assert said in exits[0].stderr and "Traceback" not in exits[0].stderr
