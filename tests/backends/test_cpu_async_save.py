# SPDX-License-Identifier: Apache-2.0
"""Asynchronous checkpoints (`--async-save`) on CPU: Megatron's own writer process, where there is no CUDA device."""

import os
from functools import partial
from importlib.util import find_spec

import pytest

from tests.backends.runs import DROPOUT
from tests.support.every_run import one_of_each
from tests.support.presets import PRECISIONS, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain
from tests.support.slow_writer import ASYNC, at_step, hold_writes, open_gate, start_writers_at_once


@pytest.mark.parametrize("precision", one_of_each(["fp32", "bf16-distopt"], {1}))
def test_a_resume_from_an_asynchronous_save_ends_with_the_same_bits(precision, tmp_path):
    folder, gate = os.fspath(tmp_path / "saved"), os.fspath(tmp_path / "gate")
    options = {**PRECISIONS[precision], **DROPOUT}
    conventional = run_pretrain(toy_gpt(options), 2)
    opening = partial(at_step, 3, partial(open_gate, gate))
    through = run_pretrain(
        toy_gpt(options, ASYNC, save=folder, save_interval=2),
        2,
        before=(start_writers_at_once, partial(hold_writes, gate), opening),
    )
    resumed = run_pretrain(toy_gpt(options, load=folder, ckpt_step=2, dist_ckpt_strictness="log_all"), 2)
    for whole, before, after in zip(conventional, through, resumed, strict=True):
        assert whole.losses == before.losses and before.losses[2:] == after.losses
        assert whole.parameters == before.parameters == after.parameters
        assert whole.optimizer == before.optimizer == after.optimizer


def test_a_writer_from_its_own_fork_server_writes_on_a_machine_without_a_gpu(tmp_path):
    run = toy_gpt(ASYNC, save=os.fspath(tmp_path), save_interval=2)
    run_pretrain(run, 1)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_a_run_that_would_wait_for_its_checkpoints_after_all_is_told(tmp_path):
    ranks = run_pretrain(toy_gpt(async_save=True, save=os.fspath(tmp_path), save_interval=4), 1)
    assert "--async-save has no effect without --use-persistent-ckpt-worker" in ranks[0].stdout


@pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is not None, reason="nvidia-resiliency-ext is installed")
def test_a_writer_that_is_not_installed_is_refused_at_the_start_with_the_way_out(tmp_path):
    run = toy_gpt(ASYNC, async_strategy=None, save=os.fspath(tmp_path), save_interval=2)
    (rank,) = run_failing_pretrain(run, 1)
    said = "nvidia-resiliency-ext>=0.6, which is not installed; pip install 'nvidia-resiliency-ext>=0.6', or add "
    assert f"{said}--async-strategy mcore" in rank.stderr
    assert "Traceback" not in rank.stderr


@pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext is not installed")
def test_a_resume_from_a_save_of_the_resiliency_extensions_writer_ends_with_the_same_bits(tmp_path):
    options = {**PRECISIONS["bf16-distopt"], **DROPOUT}
    through = run_pretrain(toy_gpt(options, ASYNC, async_strategy="nvrx", save=os.fspath(tmp_path), save_interval=2), 2)
    resumed = run_pretrain(toy_gpt(options, load=os.fspath(tmp_path), ckpt_step=2), 2)
    for before, after in zip(through, resumed, strict=True):
        assert before.losses[2:] == after.losses and before.optimizer == after.optimizer
