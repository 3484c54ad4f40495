# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron on CPU + gloo: a run that stopped in the middle and continued ends with the same bits."""

import os
import re

import pytest

from tests.backends.runs import DROPOUT, losses, stock, validation_losses
from tests.support.every_run import one_of_each
from tests.support.main_values import main_values
from tests.support.presets import LAYOUTS, PRECISIONS, Options, command_line, toy_gpt
from tests.support.pretrain import run_pretrain

RESUMES = {
    "fp32": DROPOUT,
    "bf16": {**PRECISIONS["bf16"], **DROPOUT, "ckpt_assume_constant_structure": True},
    "bf16-overlap-tp2-sp": {
        **LAYOUTS["tp2-sp"].options,
        **PRECISIONS["bf16-distopt-overlap"],
        **DROPOUT,
    },
    "fp16-reshardable": {
        "fp16": True,
        "initial_loss_scale": 2.0**18,
        "loss_scale_window": 2,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "ckpt_fully_parallel_load": True,
    },
    "bf16-torch-format": {**PRECISIONS["bf16-distopt"], **DROPOUT, "ckpt_format": "torch"},
    "bf16-experts": {**LAYOUTS["moe-ep2"].options, **PRECISIONS["bf16-distopt-overlap"]},
}


# What stock Megatron cannot read, and patch_megatron() repairs.
REPAIRED = {
    "fp32-sgd": {"optimizer": "sgd", "lr": 0.1, **DROPOUT},
    "bf16-sgd-without-momentum": {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.0, **PRECISIONS["bf16"]},
}


@pytest.mark.parametrize(
    ("run", "options"),
    [
        *(
            pytest.param(stock, options, id=name, marks=pytest.mark.slow if name in ("bf16", "bf16-experts") else ())
            for name, options in RESUMES.items()
        ),
        *(pytest.param(run_pretrain, options, id=name) for name, options in REPAIRED.items()),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(run, options, tmp_path):
    folder = os.fspath(tmp_path)
    options = {**options, "save": folder, "save_interval": 2, "eval_iters": 1, "eval_interval": 3}
    through = run(toy_gpt(options), 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run(toy_gpt(options, load=folder), 2)
    assert [step.iteration for step in resumed[0].record.steps] == [3, 4]
    for before, after in zip(through, resumed, strict=True):
        assert before.losses[2:] == after.losses
        assert before.grad_norms[2:] == after.grad_norms
        assert before.parameters == after.parameters
        assert before.optimizer == after.optimizer
    assert validation_losses(through)[3] == validation_losses(resumed)[3]
    assert len(set(losses(through))) == 4  # a run that does not move would resume exactly, too


KEEPING = {
    "save_interval": 1,
    "save_retain_interval": 2,
    "no_save_rng": True,
    "no_ckpt_fully_parallel_save": True,
    "dist_ckpt_workers": 2,
    "verify_integrity": True,
    "log_progress": True,
}
READING = {
    "ckpt_step": 2,
    "no_load_rng": True,
    "dist_ckpt_strictness": "raise_unexpected",
    "no_ckpt_load_validate_sharding_integrity": True,
    "auto_detect_ckpt_format": True,
    "use_checkpoint_args": True,
    "exit_on_missing_checkpoint": True,
    "verify_integrity": True,
}


def test_options_for_keeping_and_reading_checkpoints(tmp_path):
    run = toy_gpt(PRECISIONS["bf16-distopt"])
    through = stock([*run, *command_line({**KEEPING, "save": os.fspath(tmp_path)})], 2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert (tmp_path / "progress.txt").read_text().count("Saved checkpoint") == 4
    resumed = stock([*run, *command_line({**READING, "load": os.fspath(tmp_path)})], 2)
    assert losses(resumed) == losses(through)[2:]
    assert [rank.optimizer for rank in resumed] == [rank.optimizer for rank in through]


WRITING = {
    "save_interval": 1,
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "ckpt_fully_parallel_save_process_group": "ep_dp",
    "dist_ckpt_save_pre_mcore_014": True,
}
TAKING = {
    "ckpt_step": 2,
    "use_distributed_optimizer": True,
    "ckpt_fully_parallel_load": True,
    "ckpt_fully_parallel_load_process_group": "ep_dp",
    "ckpt_fully_parallel_load_exchange_algo": "gather_object",
    "use_checkpoint_args": True,
    "use_mp_args_from_checkpoint_args": True,
}


def test_options_for_writing_and_taking_checkpoints_in_other_ways(tmp_path):
    run = toy_gpt(LAYOUTS["moe-ep2"].options, {"create_all_gather_group": True}, PRECISIONS["bf16"])
    through = stock([*run, *command_line({**WRITING, "save": os.fspath(tmp_path)})], 2)
    resumed = stock([*run, *command_line({**TAKING, "load": os.fspath(tmp_path)})], 2)
    assert losses(resumed) == losses(through)[2:]
    assert [rank.optimizer for rank in resumed] == [rank.optimizer for rank in through]


@pytest.mark.parametrize(("before", "after"), one_of_each([("torch_dist", "torch"), ("torch", "torch_dist")], {1}))
def test_a_resume_from_a_converted_checkpoint_keeps_the_bits(tmp_path, before, after):
    run, first, second = toy_gpt(PRECISIONS["bf16-distopt"]), *(os.fspath(tmp_path / name) for name in ("a", "b"))
    through = stock([*run, *command_line({"ckpt_format": before, "save": first, "save_interval": 2})], 2)
    (tmp_path / "a/latest_checkpointed_iteration.txt").write_text("2")
    converting = {"ckpt_format": before, "load": first, "ckpt_convert_format": after, "ckpt_convert_save": second}
    converted = stock([*run, *command_line(converting)], 2)
    assert losses(converted) == [] and f"converted checkpoint: {before} -> {after}" in converted[0].stdout
    # Megatron names the folder after the format.
    resumed = stock([*run, *command_line({"ckpt_format": after, "load": f"{second}/{after}"})], 2)
    assert losses(resumed) == losses(through)[2:]
    assert [rank.optimizer for rank in resumed] == [rank.optimizer for rank in through]
    assert len(set(losses(through))) == 4  # a run that does not move would resume exactly, too


@pytest.mark.slow
def test_an_iteration_that_is_overridden_moves_the_place_in_the_data(tmp_path):
    through = stock(toy_gpt(save=os.fspath(tmp_path), save_interval=2), 2)
    again = stock(toy_gpt(load=os.fspath(tmp_path), ckpt_step=2, override_ckpt_iteration=1), 2)
    assert [step.iteration for step in again[0].record.steps] == [2, 3, 4]
    consumed = [re.findall(r"consumed samples: +(\d+) \|", run[-1].stdout) for run in (through, again)]
    assert consumed[1] == consumed[0][1:]
    # The second batch, with weights that have seen it.
    assert losses(again)[0] != losses(through)[1] == pytest.approx(losses(again)[0], rel=0.05)


@pytest.mark.parametrize(
    "reading",
    [
        lambda folder: {"load": folder, "no_load_optim": True, "train_iters": 5},
        lambda folder: {"load": folder, "finetune": True, "train_iters": 1},
        lambda folder: {"pretrained_checkpoint": folder, "load": f"{folder}/none", "train_iters": 1},
    ],
    ids=["no-load-optim", "finetune", "pretrained"],
)
def test_weights_alone_can_be_saved_and_loaded(tmp_path, reading):
    folder = os.fspath(tmp_path)
    trained = stock(toy_gpt(save=folder, save_interval=4, no_save_optim=True), 1)
    # A step this small changes no weight.
    loaded = stock(toy_gpt({"lr": 1e-30, "weight_decay": 0.0}, reading(folder)), 1)
    assert loaded[0].parameters == trained[0].parameters


NO_STEP: Options = {"lr": 1e-30, "weight_decay": 0.0}
"""A step this small changes no weight."""


@pytest.mark.slow
def test_main_values_in_fp32_are_those_of_a_checkpoint_in_fp32(tmp_path):
    files: Options = {"ckpt_format": "torch", "num_layers": 4, **LAYOUTS["pp2-vpp2"].options}
    saved = run_pretrain(toy_gpt(files, save=os.fspath(tmp_path), save_interval=4), 2, probe=main_values)
    load: Options = {"load": os.fspath(tmp_path), "no_load_optim": True, "train_iters": 5, **NO_STEP}
    run = toy_gpt(files, load, PRECISIONS["bf16-distopt"], load_main_params_from_ckpt=True)
    loaded = run_pretrain(run, 2, probe=main_values)
    assert [rank.probe for rank in loaded] == [rank.probe for rank in saved]


def test_fp16_skips_steps_that_overflow_and_continues():
    options = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1, "train_iters": 8}
    (rank,) = stock(toy_gpt(options), 1)
    skipped = [step.skipped for step in rank.record.steps]
    assert skipped[0] and not skipped[-1]
