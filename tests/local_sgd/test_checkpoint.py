# SPDX-License-Identifier: Apache-2.0
"""Invariant 6 and the rules of checkpoints: resume anywhere, stock Megatron reads sync points, W may change."""

import re
import shutil

import pytest

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.runs import arguments, local_run, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_failing_pretrain, run_pretrain

SCHEDULE = {"train_iters": 8, "local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 3}
# Iteration 1 lies in warm-up, 2 where the anchor is taken, 4 in mid-interval, 5 at a sync point with momentum.
ANYWHERE, APART_AND_SYNCED = (1, 2, 4, 5), (4, 5)
# The detector flags from the third round on, which follows iteration 11: what a resume forgets would show in weights.
PENALTY = {
    "train_iters": 13,
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_ewma_alpha": 0.5,
    "local_sgd_ewma_threshold": 0.1,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.1,
    "local_sgd_pseudo_grad_reducer": "gta",
    "local_sgd_pseudo_grad_consensus": "sum",
    "local_sgd_pseudo_grad_sparsification": "random",
    "local_sgd_pseudo_grad_density": 0.5,
}
ADAM = {"outer_optimizer": "adam", "outer_optimizer_lr": 0.01}
RESHARDABLE = {"dist_ckpt_optim_fully_reshardable": True, "local_sgd_cpu_offload": True, **ADAM}
EAGER = {"local_sgd_eager_updates": True, "local_sgd_evaluation": "workers"}
PAIRS = {"local_sgd_pseudo_grad_reducer": "pairwise", "local_sgd_evaluation": "workers"}
# At iteration 4 the first fragment's second round is in flight, at 6 the second one's.
STREAMING = {
    "local_sgd_fragments": 2,
    "local_sgd_sync_interval": 4,
    "local_sgd_fragment_sync_delay": 3,
    "local_sgd_fragment_update_alpha": 0.5,
}


@pytest.mark.parametrize(
    ("layout", "precision", "workers", "points", "extra"),
    [
        ("dp2", "bf16-distopt-overlap", 2, ANYWHERE, {}),
        pytest.param("dp2", "bf16-distopt", 2, (9, 11), PENALTY, id="penalty"),
        *(
            pytest.param(*values[:-1], id=values[-1], marks=pytest.mark.slow)
            for values in (
                ("pp2", "bf16-distopt-overlap", 2, (4, 6), STREAMING, "streaming"),
                ("single", "fp32", 2, ANYWHERE, {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "dropout"),
                ("single", "bf16", 3, APART_AND_SYNCED, ADAM, "three workers"),
                ("single", "fp32", 2, APART_AND_SYNCED, {"fp16": True, "initial_loss_scale": 2.0**15}, "fp16"),
                ("tp2", "bf16-distopt", 2, APART_AND_SYNCED, RESHARDABLE, "reshardable"),
                ("pp2", "bf16-distopt-overlap", 2, APART_AND_SYNCED, ADAM, "stages"),
                ("pp2-vpp2", "fp32-distopt", 2, APART_AND_SYNCED, {"global_batch_size": 8}, "interleaved stages"),
                ("moe-ep2", "bf16-distopt", 2, ANYWHERE, {}, "experts"),
                ("dp2", "bf16", 2, APART_AND_SYNCED, {"optimizer": "sgd", "lr": 0.1}, "inner SGD"),
                ("single", "bf16", 2, APART_AND_SYNCED, {"local_sgd_codec": "int4"}, "codec"),
                ("tp2", "bf16-distopt", 2, APART_AND_SYNCED, {"local_sgd_codec": "topk"}, "sharded codec"),
                ("pp2", "bf16-distopt", 2, APART_AND_SYNCED, {"local_sgd_codec": "topk2"}, "codec in 2 bits"),
                ("dp2", "bf16-distopt", 2, APART_AND_SYNCED, PAIRS, "pairs"),
                ("single", "bf16", 2, APART_AND_SYNCED, EAGER, "eager"),
            )
        ),
    ],
)
def test_a_resume_at_any_iteration_follows_the_uninterrupted_run_bit_for_bit(
    tmp_path, layout, precision, workers, points, extra
):
    options = {**SCHEDULE, **extra}
    whole = local_run(layout, precision, workers=workers, save=str(tmp_path), save_interval=1, **options)
    for iteration in points:
        resumed = local_run(layout, precision, workers=workers, load=str(tmp_path), ckpt_step=iteration, **options)
        assert same_state(resumed, whole), f"resumed at {iteration}"
        assert [rank.losses for rank in resumed] == [rank.losses[iteration:] for rank in whole]


def test_another_interval_while_rounds_are_in_flight_is_refused(tmp_path):
    options = {**SCHEDULE, **STREAMING, "train_iters": 6}
    local_run("single", "fp32", workers=2, save=str(tmp_path), save_interval=4, **options)
    other = {**options, "local_sgd_sync_interval": 6, "load": str(tmp_path), "ckpt_step": 4}
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **other), 2)
    said = "rounds of fragments were in flight, so that --local-sgd-sync-interval has to be 4, not 6"
    assert said in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


@pytest.mark.parametrize("precision", one_of_each(["fp32", "fp32-distopt"], {1}))
def test_a_save_before_the_first_step_that_fp16_does_not_skip_can_be_resumed(tmp_path, precision):
    options = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1, "local_sgd_sync_interval": 4}
    options |= {"train_iters": 14, "loss_scale_window": 1000, "min_loss_scale": 1.0}
    whole = local_run("single", precision, workers=2, save=str(tmp_path), save_interval=1, **options)
    assert whole[0].record.steps[0].skipped
    assert not whole[0].record.steps[-1].skipped, [step.skipped for step in whole[0].record.steps]
    resumed = local_run("single", precision, workers=2, load=str(tmp_path), ckpt_step=1, **options)
    assert same_state(resumed, whole)


def test_streaming_ends_with_equal_workers_in_a_checkpoint_that_stock_megatron_reads(tmp_path):
    options = {**SCHEDULE, **STREAMING, "train_iters": 5}
    ranks = local_run("dp2", "bf16-distopt", workers=2, save=str(tmp_path), save_interval=5, **options)
    first, second = (model_digests(part) for part in worker_slices(ranks, "dp2", 2))
    assert first == second
    run = arguments("dp2", "bf16-distopt", workers=None, load=str(tmp_path), **{**ONLY_LOAD, "train_iters": 5})
    stock = run_pretrain(run, 2, patch="backend-only")
    assert [rank.parameters for rank in stock] == [rank.parameters for rank in worker_slices(ranks, "dp2", 2)[0]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 2 workers x DP 2 with the distributed optimizer, saved after every iteration."""
    directory = tmp_path_factory.mktemp("saved")
    local_run("dp2", "bf16-distopt", workers=2, save=str(directory), save_interval=1, **SCHEDULE)
    return directory


# No step is made: what is compared is what was loaded. The batch size differs, and with it the samples of the schedule.
ONLY_LOAD = {"ckpt_step": 5, "train_iters": 5, "use_checkpoint_opt_param_scheduler": True}


def inner_states(model, optimizer, args):
    """Probe: digests of the inner optimizer's moments, and its number of steps."""
    import hashlib

    return [
        (
            {
                name: hashlib.md5(state[name].detach().cpu().numpy().tobytes()).hexdigest()
                for name in ("exp_avg", "exp_avg_sq")
            },
            float(state["step"]),
        )
        for member in optimizer.chained_optimizers
        for state in member.optimizer.state.values()
    ]


@pytest.fixture(scope="module")
def loaded(saved):
    """The ranks of the run that saved, right after loading the sync point."""
    run = arguments("dp2", "bf16-distopt", workers=2, load=str(saved), **{**SCHEDULE, **ONLY_LOAD})
    return run_pretrain(run, 4, probe=inner_states)


def test_stock_megatron_reads_weights_and_optimizer_of_worker_zero_at_a_sync_point(saved, loaded):
    # The layout of one worker: as many ranks, the same data-parallel size.
    run = arguments("dp2", "bf16-distopt", workers=None, load=str(saved), **ONLY_LOAD)
    stock = run_pretrain(run, 2, patch="backend-only", probe=inner_states)
    assert model_digests(stock) == model_digests(loaded[:2])
    assert [rank.probe for rank in stock] == [rank.probe for rank in loaded[:2]]


def test_stock_megatron_resumes_from_a_sync_point(saved):
    options = {"load": str(saved), "ckpt_step": 5, "train_iters": 7, "use_checkpoint_opt_param_scheduler": True}
    stock = run_pretrain(arguments("dp2", "bf16-distopt", workers=None, **options), 2, patch="backend-only")
    assert [step.iteration for step in stock[0].record.steps] == [6, 7]


def test_the_other_workers_inner_states_differ_so_that_taking_them_over_means_something(loaded):
    assert loaded[0].probe != loaded[2].probe


def test_stock_megatron_refuses_a_checkpoint_from_mid_interval(saved):
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=None, load=str(saved), ckpt_step=4), 2, patch="backend-only"
    )
    assert all(rank.exit_code != 0 for rank in exits)


def test_a_stock_checkpoint_starts_a_fresh_outer_state_and_says_so(tmp_path):
    run_pretrain(
        arguments("dp2", "bf16-distopt", workers=None, train_iters=3, save=str(tmp_path), save_interval=3),
        2,
        patch="backend-only",
    )
    options = {"load": str(tmp_path), "train_iters": 7, "use_checkpoint_opt_param_scheduler": True}
    ranks = local_run("dp2", "bf16-distopt", workers=2, local_sgd_sync_interval=2, **options)
    assert "without local-SGD state" in ranks[0].stdout
    first, second = (model_digests(part) for part in worker_slices(ranks, "dp2", 2))
    assert first == second


def test_a_stock_checkpoint_of_steps_that_fp16_has_all_skipped_is_refused_with_the_way_out(tmp_path):
    fp16 = {"fp16": True, "initial_loss_scale": 2.0**30, "hysteresis": 1}
    run = arguments("single", "fp32", workers=None, train_iters=2, save=str(tmp_path), save_interval=2, **fp16)
    run_pretrain(run, 1, patch="backend-only")
    options = {"load": str(tmp_path), "train_iters": 4, "use_checkpoint_opt_param_scheduler": True, **fp16}
    options["local_sgd_sync_interval"] = 2
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **options), 2)
    said = "if fp16 had skipped every step when it was saved, its weights alone with --no-load-optim"
    assert said in exits[0].stderr
    local_run("single", "fp32", workers=2, no_load_optim=True, **options)


def test_a_run_that_finds_nothing_to_load_says_so(tmp_path):
    ranks = local_run("single", "fp32", workers=2, load=str(tmp_path / "none"), train_iters=2)
    assert f"no checkpoint was found in --load {tmp_path / 'none'}" in ranks[0].stdout


def test_another_number_of_workers_takes_over_worker_i_mod_w(saved, loaded):
    # 4 workers of one rank each, from 2 workers of two: a worker's whole state lies on its one rank now.
    changed = {**SCHEDULE, **ONLY_LOAD, "outer_optimizer_lr": 0.5}
    run = arguments("single", "bf16-distopt", workers=4, load=str(saved), **changed)
    ranks = run_pretrain(run, 4, probe=inner_states)
    assert "; --outer-optimizer-lr was 0.7 and is 0.5 from here on" in ranks[0].stdout
    assert "worker i takes the inner state of worker i mod 2" in ranks[0].stdout
    assert all(rank.parameters == loaded[0].parameters for rank in ranks)
    assert ranks[0].probe == ranks[2].probe != ranks[1].probe == ranks[3].probe


def test_fewer_workers_leave_the_states_of_the_others_behind(saved, loaded):
    run = arguments("dp2", "bf16-distopt", workers=1, load=str(saved), **{**SCHEDULE, **ONLY_LOAD})
    ranks = run_pretrain(run, 2, probe=inner_states)
    assert [rank.probe for rank in ranks] == [rank.probe for rank in loaded[:2]]


def test_mid_interval_with_another_number_of_workers_is_refused_with_the_way_out(saved):
    exits = run_failing_pretrain(
        arguments("single", "bf16-distopt", workers=4, load=str(saved), ckpt_step=4, local_sgd_sync_interval=3),
        4,
    )
    assert "needs --local-sgd-workers 2, not 4" in exits[0].stderr
    assert "up to a sync point (iteration 5; where --train-iters has to grow for it" in exits[0].stderr


@pytest.mark.parametrize("workers", [None, 1])
def test_mid_interval_without_workers_is_refused_with_the_way_out(saved, workers):
    exits = run_failing_pretrain(arguments("dp2", "bf16-distopt", workers=workers, load=str(saved), ckpt_step=4), 2)
    assert "needs --use-local-sgd --local-sgd-workers 2" in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


def test_a_warmup_that_reaches_beyond_the_checkpoint_is_refused(saved):
    other = {**SCHEDULE, "local_sgd_warmup_steps": 7}
    exits = run_failing_pretrain(arguments("dp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=4, **other), 4)
    assert "--local-sgd-warmup-steps 7 lies beyond its iteration 4" in exits[0].stderr


def test_a_sync_point_can_be_evaluated_without_training(saved):
    options = {"ckpt_step": 5, "skip_train": True, "eval_iters": 2, "eval_interval": 100}
    ranks = local_run("dp2", "bf16-distopt", workers=2, load=str(saved), **{**SCHEDULE, **options})
    assert "evaluating the weights that were loaded" in ranks[0].stdout
    assert any("validation loss at iteration" in rank.stdout for rank in ranks)


@pytest.mark.parametrize("option", ["no_load_optim", "finetune", "skip_train"])
def test_mid_interval_without_optimizer_state_is_refused(saved, option):
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=4, **{option: True}), 4
    )
    assert f"--{option.replace('_', '-')} would discard" in exits[0].stderr


@pytest.mark.parametrize("way", ["no_load_optim", "finetune", "pretrained_checkpoint"])
def test_a_sync_point_loads_without_optimizer_state_and_starts_a_fresh_outer_one(saved, loaded, tmp_path, way):
    where = {"load": str(saved), "ckpt_step": 5, way: True}
    if way == "pretrained_checkpoint":  # --ckpt-step speaks of --load alone
        (tmp_path / "iter_0000005").symlink_to(saved / "iter_0000005")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
        where = {"load": str(tmp_path / "none"), way: str(tmp_path)}
    # Steps this small change no weight, and then nor does the outer step of the round that follows.
    ranks = local_run("dp2", "bf16-distopt", workers=2, lr=1e-30, weight_decay=0.0, **where, **SCHEDULE)
    assert "round 1 " in ranks[0].stdout or "outer round: 1" in "".join(rank.stdout for rank in ranks)
    assert [rank.parameters for rank in ranks] == [rank.parameters for rank in loaded]


KEEPING = {
    "save_interval": 1,
    "save_retain_interval": 4,
    "no_save_rng": True,
    "no_ckpt_fully_parallel_save": True,
    "dist_ckpt_workers": 2,
    "verify_integrity": True,
    "log_progress": True,
}
READING = {
    "ckpt_step": 4,
    "no_load_rng": True,
    "dist_ckpt_strictness": "raise_unexpected",
    "ckpt_fully_parallel_load": True,
    "no_ckpt_load_validate_sharding_integrity": True,
    "auto_detect_ckpt_format": True,
    "use_checkpoint_args": True,
    "exit_on_missing_checkpoint": True,
    "verify_integrity": True,
}


def test_an_iteration_that_is_overridden_moves_the_place_in_the_data_and_no_round(tmp_path):
    options = {**SCHEDULE, "local_sgd_round_log": str(tmp_path / "through"), "save": str(tmp_path), "save_interval": 1}
    through = local_run("dp2", "bf16-distopt", workers=2, **options)
    assert [entry["iteration"] for entry in read_rounds(tmp_path / "through")] == [5, 8]
    # After iteration 4 there were 2 steps of 3.
    options = {**SCHEDULE, "local_sgd_round_log": str(tmp_path / "again"), "load": str(tmp_path), "ckpt_step": 4}
    again = local_run("dp2", "bf16-distopt", workers=2, **options, override_ckpt_iteration=2)
    assert [step.iteration for step in again[0].record.steps] == [3, 4, 5, 6, 7, 8]
    assert [entry["iteration"] for entry in read_rounds(tmp_path / "again")] == [3, 6]
    consumed = [re.findall(r"consumed samples: +(\d+) \|", run[-1].stdout) for run in (through, again)]
    assert consumed[1] == consumed[0][2:]
    back = arguments("dp2", "bf16-distopt", workers=2, **options, override_ckpt_iteration=1)
    errors = run_failing_pretrain(back, 4)[0].stderr
    assert "--local-sgd-warmup-steps 2 lies beyond --override-ckpt-iteration 1; give" in errors


def test_options_for_keeping_and_reading_checkpoints(tmp_path):
    whole = local_run("dp2", "bf16-distopt", workers=2, save=str(tmp_path), **KEEPING, **SCHEDULE)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000008"]
    assert (tmp_path / "progress.txt").read_text().count("Saved checkpoint") == 8
    resumed = local_run("dp2", "bf16-distopt", workers=2, load=str(tmp_path), **READING, **SCHEDULE)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[4:] for rank in whole]
    file = max((tmp_path / "iter_0000004").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(tmp_path), **READING, **SCHEDULE), 4
    )
    errors = "".join(rank.stderr for rank in exits)
    assert f"--load {tmp_path}: the checkpoint cannot be read" in errors and file.name in errors
    assert "Traceback" not in errors


WRITING = {
    "save_interval": 1,
    "dist_ckpt_optim_fully_reshardable": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "ckpt_fully_parallel_save_process_group": "ep_dp",
    "dist_ckpt_save_pre_mcore_014": True,
}
TAKING = {
    "dist_ckpt_optim_fully_reshardable": True,
    "ckpt_fully_parallel_load": True,
    "ckpt_fully_parallel_load_process_group": "ep_dp",
    "ckpt_fully_parallel_load_exchange_algo": "gather_object",
    "use_checkpoint_args": True,
    "use_mp_args_from_checkpoint_args": True,
}


def test_options_for_writing_and_taking_checkpoints_in_other_ways(tmp_path):
    run = {**SCHEDULE, "workers": 2, "train_iters": 6}
    whole = local_run("moe-ep2", "bf16-distopt", **run, save=str(tmp_path), **WRITING)
    for iteration in APART_AND_SYNCED:
        resumed = local_run("moe-ep2", "bf16-distopt", **run, load=str(tmp_path), ckpt_step=iteration, **TAKING)
        assert same_state(resumed, whole)
        assert [rank.losses for rank in resumed] == [rank.losses[iteration:] for rank in whole]


def test_a_structure_that_is_to_be_constant_may_change(tmp_path):
    options = {**SCHEDULE, "train_iters": 6, "ckpt_assume_constant_structure": True}
    whole = local_run("single", "bf16", workers=2, save=str(tmp_path), save_interval=1, **options)
    assert "--ckpt-assume-constant-structure has no effect" in whole[0].stdout
    for iteration in APART_AND_SYNCED:  # the first save was made in warm-up
        resumed = local_run("single", "bf16", workers=2, load=str(tmp_path), ckpt_step=iteration, **options)
        assert same_state(resumed, whole), f"resumed at {iteration}"


def test_another_layout_without_a_reshardable_format_is_refused_up_front(saved):
    exits = run_failing_pretrain(
        arguments("tp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=5, **SCHEDULE), 4
    )
    assert "--dist-ckpt-optim-fully-reshardable" in exits[0].stderr


def norms(model, optimizer, args):
    """Probe: L2 norms over this rank's worker of weights, anchor and outer momentum."""
    import torch.distributed as dist

    from megatron_ext.hooks import hooks
    from megatron_ext.local_sgd.feature import LocalSGDFeature
    from megatron_ext.seams.process_groups import current_groups

    (engine,) = [feature._worker.engine for feature in hooks.active if isinstance(feature, LocalSGDFeature)]
    found = {}
    for name, tensors in {"weights": engine.values, **engine.tensor_state()}.items():
        square = sum(
            tensor.double().square().sum()
            for tensor, entry in zip(tensors, engine.synced_tensors, strict=True)
            if entry.counted
        )
        dist.all_reduce(square, group=current_groups().inside)
        found[name] = float(square.sqrt())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [4, 5], ids=["mid-interval", "sync point"])
def test_another_layout_loads_what_was_saved_reshardable(tmp_path, iteration):
    options = {**SCHEDULE, "dist_ckpt_optim_fully_reshardable": True, "global_batch_size": 8}
    local_run("dp2", "bf16-distopt", workers=2, save=str(tmp_path), save_interval=iteration, **options)
    read = {**options, **ONLY_LOAD, "load": str(tmp_path), "ckpt_step": iteration, "train_iters": iteration}
    before = run_pretrain(arguments("dp2", "bf16-distopt", workers=2, **read), 4, probe=norms)
    after = run_pretrain(arguments("tp2", "bf16-distopt", workers=2, **read), 4, probe=norms)
    assert [rank.probe for rank in after] == [pytest.approx(rank.probe, rel=1e-12) for rank in before]
    assert set(after[0].probe) == {"weights", "anchor", "momentum_buffer"}
    assert (after[0].probe != after[2].probe) == (iteration == 4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"ffn_hidden_size": 96},
            "decoder.layers.0.mlp.linear_fc1.weight has the shape [128, 32] there and [96, 32] here",
        ),
        ({"untie_embeddings_and_output_weights": True}, "it has no parameter output_layer.weight"),
        ({"num_layers": 1}, "this model has no parameter decoder.layers.1."),
    ],
    ids=["shape", "more", "fewer"],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_parameter(saved, other, message):
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=5, **SCHEDULE, **other), 4
    )
    assert message in exits[0].stderr
    assert "give the options of the run that saved it" in exits[0].stderr


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"outer_optimizer": "adam", "outer_optimizer_lr": 0.1},
            "--outer-optimizer was 'sgd' in the run that saved it, and is 'adam' now",
        ),
        (
            {"local_sgd_pseudo_grad_reducer": "gta", "local_sgd_pseudo_grad_consensus": "sum"},
            "--local-sgd-pseudo-grad-reducer was not given in the run that saved it, and is 'gta' now",
        ),
        # Of the optimizer's format.
        ({"ddp_num_buckets": 2, "overlap_grad_reduce": True}, "saved with --ddp-num-buckets None, this run has 2"),
        ({"local_sgd_codec": "int8"}, "--local-sgd-codec was not given in the run that saved it, and is 'int8' now"),
    ],
    ids=["outer optimizer", "reducer", "buckets", "codec"],
)
def test_another_method_is_refused_by_the_name_of_its_flag(saved, other, message):
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(saved), ckpt_step=5, **SCHEDULE, **other), 4
    )
    assert message in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


def test_a_truncated_checkpoint_is_refused_with_the_way_out(saved, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    victim = max((damaged / "iter_0000005").glob("*.distcp"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:100])
    exits = run_failing_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, load=str(damaged), ckpt_step=5, **SCHEDULE), 4
    )
    said = f"the checkpoint cannot be read: {victim} has 100 bytes instead of "
    assert any(said in rank.stderr and "--ckpt-step" in rank.stderr for rank in exits)


def test_layout_of_every_preset_is_known():
    assert {"dp2", "tp2", "pp2", "moe-ep2"} <= set(LAYOUTS)
