# SPDX-License-Identifier: Apache-2.0
"""Megatron's legacy checkpoint format (`--ckpt-format torch`): a file per rank, and workers' files in folders."""

import shutil

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, same_state
from tests.local_sgd.test_checkpoint import ONLY_LOAD, STREAMING, inner_states
from tests.support.main_values import main_values
from tests.support.pretrain import run_failing_pretrain, run_pretrain

LEGACY = {"ckpt_format": "torch"}
SCHEDULE = {"train_iters": 8, "local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 3}
ADAM_ON_HOST = {"outer_optimizer": "adam", "outer_optimizer_lr": 0.01, "local_sgd_cpu_offload": True}
CODEC = {"local_sgd_codec": "int4"}


@pytest.mark.parametrize(
    ("layout", "precision", "points", "extra"),
    [
        # Iteration 1 lies in warm-up, 4 in mid-interval, 5 at a sync point with momentum.
        pytest.param("dp2", "bf16-distopt-overlap", (1, 4, 5), {}, id="replicas"),
        pytest.param("pp2", "bf16", (4, 6), STREAMING, id="stages", marks=pytest.mark.slow),
        *(
            pytest.param(*values[:-1], id=values[-1], marks=pytest.mark.slow)
            for values in (
                ("tp2", "bf16-distopt", (4, 5), ADAM_ON_HOST, "tensors"),
                ("moe-ep2", "bf16-distopt", (4, 5), {}, "experts"),
                ("single", "fp32", (4, 5), {**CODEC, "hidden_dropout": 0.1, "attention_dropout": 0.1}, "codec"),
                ("dp2", "fp32", (4, 5), {"optimizer": "sgd", "lr": 0.1}, "inner SGD"),
                ("dp2", "bf16", (4, 5), {"optimizer": "dist_muon"}, "layer-wise"),
                ("pp2-vpp2", "fp32-distopt", (4, 5), {"global_batch_size": 8}, "interleaved stages"),
            )
        ),
    ],
)
def test_a_resume_follows_the_uninterrupted_run_bit_for_bit(tmp_path, layout, precision, points, extra):
    options = {**SCHEDULE, **LEGACY, **extra}
    whole = local_run(layout, precision, workers=2, save=str(tmp_path), save_interval=1, **options)
    for iteration in points:
        # Another one is the newest: of that one Megatron itself reads the distributed optimizer's state.
        resumed = local_run(layout, precision, workers=2, load=str(tmp_path), ckpt_step=iteration, **options)
        assert same_state(resumed, whole), f"resumed at {iteration}"
        assert [rank.losses for rank in resumed] == [rank.losses[iteration:] for rank in whole]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 2 workers x DP 2 with the distributed optimizer, saved in mid-interval and at the sync point after."""
    directory = tmp_path_factory.mktemp("saved")
    options = {**SCHEDULE, **LEGACY, "train_iters": 5, "save_interval": 1, "save": str(directory)}
    local_run("dp2", "bf16-distopt", workers=2, **options)
    return directory


AT_SYNC = {**SCHEDULE, **ONLY_LOAD, **LEGACY}
IN_MID_INTERVAL = {**AT_SYNC, "ckpt_step": 4, "train_iters": 6}


@pytest.fixture(scope="module")
def loaded(saved):
    """The ranks of the run that saved, right after loading the sync point."""
    return run_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(saved), **AT_SYNC), 4, probe=inner_states
    )


def failing(saved, workers, precision="bf16-distopt", layout="dp2", ranks=None, **options):
    """Return what the ranks say that cannot load."""
    run = arguments(layout, precision, workers=workers, load=str(saved), **options)
    exits = run_failing_pretrain(run, ranks or 2 * (workers or 1))
    errors = "".join(rank.stderr for rank in exits)
    assert "Traceback" not in errors
    return errors


def test_stock_megatron_reads_a_sync_point_with_the_optimizer_of_worker_zero(saved, loaded):
    stock_only = {**ONLY_LOAD, **LEGACY, "ckpt_step": None}
    run = arguments("dp2", "bf16-distopt", workers=None, load=str(saved), **stock_only)
    stock = run_pretrain(run, 2, patch="backend-only", probe=inner_states)
    assert model_digests(stock) == model_digests(loaded[:2])
    assert [rank.probe for rank in stock] == [rank.probe for rank in loaded[:2]]
    assert loaded[0].probe != loaded[2].probe


def test_another_number_of_workers_takes_over_worker_i_mod_w(saved, loaded):
    # 4 workers of one rank each, from 2 workers of two: a worker's whole state lies on its one rank now.
    run = arguments("single", "bf16-distopt", workers=4, load=str(saved), **AT_SYNC)
    ranks = run_pretrain(run, 4, probe=inner_states)
    assert "worker i takes the inner state of worker i mod 2" in ranks[0].stdout
    assert all(rank.parameters == loaded[0].parameters for rank in ranks)
    assert ranks[0].probe == ranks[2].probe != ranks[1].probe == ranks[3].probe


def test_mid_interval_is_refused_to_other_workers_and_to_none_with_the_way_out(saved):
    assert "needs --local-sgd-workers 2, not 4" in failing(
        saved, 4, layout="single", ranks=4, **IN_MID_INTERVAL
    )
    stock_options = {key: value for key, value in IN_MID_INTERVAL.items() if not key.startswith("local_sgd")}
    assert "needs --use-local-sgd --local-sgd-workers 2" in failing(saved, None, **stock_options)
    # Megatron alone finds no weights, rather than those of one worker.
    run = arguments("dp2", "bf16-distopt", workers=None, load=str(saved), **stock_options)
    assert all(rank.exit_code != 0 for rank in run_failing_pretrain(run, 2, patch="backend-only"))


def test_a_run_in_the_other_format_reads_this_one_and_saves_its_own(saved, tmp_path):
    options = {**SCHEDULE, "use_checkpoint_opt_param_scheduler": True}
    whole = local_run("dp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=4, **LEGACY, **options)
    other = {**options, "load": str(saved), "ckpt_step": 4, "save": str(tmp_path), "save_interval": 6}
    moved = local_run("dp2", "bf16-distopt", workers=2, **other)
    assert same_state(moved, whole)
    assert list(tmp_path.glob("iter_0000006/*.distcp"))
    resumed = local_run("dp2", "bf16-distopt", workers=2, load=str(tmp_path), ckpt_step=6, **options)
    assert same_state(resumed, whole)
    # Back is the one way that there is not: Megatron reads that format only into itself.
    said = failing(tmp_path, 2, **options, **LEGACY)
    assert "its newest checkpoint is not one of --ckpt-format torch, which reads no other; drop the option" in said


def test_a_checkpoint_without_state_of_local_sgd_starts_a_fresh_one_and_says_so(tmp_path):
    stock = arguments(
        "dp2", "bf16-distopt", workers=None, train_iters=3, save=str(tmp_path), save_interval=3, **LEGACY
    )
    run_pretrain(stock, 2, patch="backend-only")
    options = {"load": str(tmp_path), "train_iters": 6, "use_checkpoint_opt_param_scheduler": True}
    ranks = local_run("dp2", "bf16-distopt", workers=2, local_sgd_sync_interval=3, **LEGACY, **options)
    assert "without local-SGD state" in ranks[0].stdout
    assert [step.iteration for step in ranks[0].record.steps] == [4, 5, 6]
    assert model_digests(ranks[:2]) == model_digests(ranks[2:])


def test_another_layout_or_optimizer_is_refused_by_the_name_of_its_flag(saved):
    tensors = failing(saved, 2, layout="tp2", ranks=4, **AT_SYNC)
    assert "saved with --tensor-model-parallel-size 1, this run has 2" in tensors
    assert "saved with --use-distributed-optimizer True, this run has False" in failing(
        saved, 2, precision="bf16", **AT_SYNC
    )
    assert "has the shape [128, 32] there and [96, 32] here" in failing(saved, 2, ffn_hidden_size=96, **AT_SYNC)


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("local_sgd_worker_1/mp_rank_00/model_optim_rng.pt", "model_optim_rng.pt is missing"),
        ("mp_rank_00/local_sgd_outer.pt", "without which this run cannot resume, cannot be read (FileNotFoundError)"),
    ],
)
def test_a_file_that_is_gone_is_named_with_the_way_out(saved, tmp_path, victim, said):
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    (damaged / "iter_0000005" / victim).unlink()
    errors = failing(damaged, 2, **AT_SYNC)
    assert said in errors and "--ckpt-step" in errors


def test_a_file_that_is_cut_off_is_refused_with_the_way_out(saved, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    file = damaged / "iter_0000005/local_sgd_worker_1/mp_rank_00/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:1000])
    errors = failing(damaged, 2, **AT_SYNC)
    assert "a file of the checkpoint cannot be read" in errors and "--ckpt-step" in errors


def test_a_save_beside_the_run_is_refused():
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, async_save=True, **LEGACY), 2)
    assert "--ckpt-format torch with --async-save is not supported: " in exits[0].stderr


def test_main_values_in_fp32_are_those_of_a_checkpoint_in_fp32(tmp_path):
    files = {**LEGACY, "save": str(tmp_path), "save_interval": 4}
    saved = run_pretrain(arguments("single", "fp32", workers=None, train_iters=4, **files), 1, probe=main_values)
    load = {"load": str(tmp_path), "no_load_optim": True, "load_main_params_from_ckpt": True, "train_iters": 6}
    options = {**LEGACY, **load, "lr": 1e-30, "weight_decay": 0.0, "local_sgd_sync_interval": 100}
    loaded = run_pretrain(arguments("single", "bf16-distopt", workers=2, **options), 2, probe=main_values)
    assert [rank.probe for rank in loaded] == [saved[0].probe] * 2
