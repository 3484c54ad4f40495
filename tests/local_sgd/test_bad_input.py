# SPDX-License-Identifier: Apache-2.0
"""Invariant 11 in the real script: one clear error that names the field and the fix, exit code not 0."""

import pytest

from megatron_ext.local_sgd.arguments import ending_notice
from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_failing_pretrain, run_pretrain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_sgd_workers": 3}, ["--local-sgd-workers 3 does not divide the data-parallel size 2"]),
        (
            {
                "local_sgd_workers": 1,
                "outer_optimizer_lr": 0.5,
                "local_sgd_codec": "int8",
                "local_sgd_sync_interval": 9,
            },
            ["--local-sgd-workers 1 with an outer optimizer steps by itself, and --local-sgd-codec need others"],
        ),
        ({"local_sgd_sync_interval": 0}, ["--local-sgd-sync-interval is 0; it must be at least 1 step"]),
        (
            {"local_sgd_workers": 1, "local_sgd_codec": "int8", "local_sgd_sync_interval": 9},
            ["so --local-sgd-codec would have no effect", "give the one an outer optimizer"],
        ),
        (
            {"local_sgd_workers": 1, "outer_optimizer": "none", "sync_service": "127.0.0.1:1"},
            [
                "--outer-optimizer none averages the weights of one worker with nobody's",
                "--local-sgd-workers 1 with an outer optimizer is not combined with --sync-service yet",
            ],
        ),
        (
            {"train_iters": None, "train_samples": 20, "local_sgd_warmup_steps": 5},
            ["--local-sgd-warmup-steps 5 leaves no local step before --train-samples 20"],
        ),
        (
            {
                "local_sgd_sync_interval": -2,
                "local_sgd_warmup_steps": 6,
                "outer_optimizer": "lion",
                "outer_optimizer_lr": "nan",
                "outer_optimizer_momentum": 1.5,
            },
            [
                "5 problems",
                "--local-sgd-sync-interval is -2",
                "--local-sgd-warmup-steps 6 leaves no local step",
                "--outer-optimizer 'lion' is not known; use one of sgd, adam, adamw, none",
                "--outer-optimizer-lr is nan",
                "--outer-optimizer-momentum is 1.5",
            ],
        ),
        (
            {
                "local_sgd_warmup_steps": 2,
                "local_sgd_sync_interval": 2,
                "outer_optimizer_lr_schedule": "1:0.7,2:0.1",
                "outer_optimizer_momentum_schedule": "5:0.9",
                "train_iters": 10,
            },
            [
                "--outer-optimizer-lr-schedule has decayed at round 2, and training has 4",
                "--outer-optimizer-momentum-schedule begins at round 5, after the last of training's 4",
            ],
        ),
        (
            {
                "local_sgd_skip_anomaly": True,
                "local_sgd_ewma_threshold": -1.0,
                "local_sgd_weight_softmax_temperature": 0.0,
                "local_sgd_clip_pseudo_grad": -1.0,
                "local_sgd_pseudo_grad_density": 1.5,
                "local_sgd_pseudo_grad_consensus": "sum",
                "local_sgd_codec_density": 0.0,
            },
            [
                "--local-sgd-codec-density is 0.0; it must be above 0 and at most 1",
                "--local-sgd-ewma-threshold is -1.0; it must be a finite number above 0",
                "--local-sgd-weight-softmax-temperature is 0.0; it must be finite and above 0",
                "--local-sgd-clip-pseudo-grad is -1.0; it must be finite and above 0",
                "--local-sgd-pseudo-grad-density is 1.5; it must be above 0 and at most 1",
                "--local-sgd-pseudo-grad-consensus needs --local-sgd-pseudo-grad-reducer gta",
            ],
        ),
        (
            {
                "local_sgd_fragments": 3,
                "local_sgd_fragment_sync_delay": 4,
                "local_sgd_fragment_update_alpha": 1.5,
                "local_sgd_sync_in_forward": True,
                "cuda_graph_impl": "local",
                "local_sgd_sync_interval": 4,
                "outer_optimizer": "adam",
                "outer_optimizer_lr": 0.1,
            },
            [
                "--local-sgd-fragments is 3; it must be at most --num-layers 2",
                "--local-sgd-fragments above 1 steps fragments apart",
                "--local-sgd-fragment-sync-delay is 4; it must be 0 or more, and below --local-sgd-sync-interval 4",
                "--local-sgd-fragment-update-alpha is 1.5",
                "--local-sgd-sync-in-forward is not combined with the --local-sgd-fragment options",
                "--local-sgd-sync-in-forward is not combined with CUDA graphs",
            ],
        ),
        (
            {
                "local_sgd_use_async": True,
                "local_sgd_data_slack": 0.5,
                "local_sgd_replay_meetings": "/nowhere/steps.jsonl",
                "phase_transition_iterations": "2",
                "train_iters": None,
                "train_samples": 80,
                "dataloader_type": "external",
                "local_sgd_sync_interval": 4,
                "local_sgd_pseudo_grad_reducer": "pairwise",
                "num_experts": 4,
                "disable_bias_linear": True,
                "moe_router_enable_expert_bias": True,
            },
            [
                "8 problems",
                "--local-sgd-pseudo-grad-reducer pairwise is not combined with --moe-router-enable-expert-bias",
                "--local-sgd-pseudo-grad-reducer pairwise is not combined with --local-sgd-use-async",
                "--local-sgd-pseudo-grad-reducer pairwise has no synced weights",
                "--local-sgd-use-async has rounds every --local-sgd-sync-time seconds; drop --local-sgd-sync-interval",
                "--local-sgd-data-slack is 0.5; it must be finite, and 1 or more",
                "--local-sgd-replay-meetings /nowhere/steps.jsonl cannot be read",
                "--local-sgd-use-async is not combined with --phase-transition-iterations",
                "--local-sgd-use-async is not combined with --dataloader-type external",
            ],
        ),
    ],
    ids=[
        *("workers", "one worker", "no interval", "one worker without rounds", "one worker that averages", "samples"),
        *("schedule and outer optimizer", "schedules", "penalty", "streaming"),
        "asynchronous",
    ],
)
def test_bad_options_are_refused_by_name_without_a_traceback(options, said):
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **options), 2)
    assert all(rank.exit_code != 0 for rank in exits)
    for part in said:
        assert part in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


@pytest.mark.parametrize(
    ("done", "since", "said"),
    [
        (1, 0, "ends 3 steps after a round"),
        (5, 0, "no round falls into this run: --train-iters 8 ends 3 steps into an interval of 4"),
        (5, 1, None),
        (6, 3, "ends 1 step after a round"),
        (8, 0, None),
    ],
)
def test_an_end_between_two_rounds_is_told_wherever_rounds_began(done, since, said):
    line = ending_notice(8, done, since, 4)
    assert line is None if said is None else said in line


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ([4], "--train-iters 8 ends 3 steps after a round"),
        ([1, 2, 3, 4], None),
        ([1, 2, 3, 4, 5], "no round falls into this run: --train-iters 8 ends 3 steps into an interval of 4"),
        ([9, 0], None),
    ],
)
def test_iterations_that_are_skipped_are_no_steps_of_the_last_interval(skipped, said):
    line = ending_notice(8, 0, 0, 4, skipped=skipped)
    assert line is None if said is None else said in line


def test_how_a_tied_embedding_on_two_stages_is_treated_is_said_where_that_is_not_as_asked_for():
    sparse = {
        "local_sgd_codec": "int8",
        "local_sgd_pseudo_grad_reducer": "gta",
        "local_sgd_pseudo_grad_sparsification": "magnitude",
        "local_sgd_pseudo_grad_density": 0.5,
    }
    said = "the tied embedding, which two pipeline stages hold, travels in bf16 instead of int8 and keeps all"
    assert said in run_pretrain(arguments("pp2", "fp32", workers=2, **sparse), 4)[0].stdout
    untied = arguments("pp2", "fp32", workers=2, untie_embeddings_and_output_weights=True, **sparse)
    assert "tied embedding" not in run_pretrain(untied, 4)[0].stdout


def test_one_worker_is_an_ordinary_run():
    from tests.local_sgd.runs import same_state
    from tests.support.pretrain import run_pretrain

    ours = run_pretrain(arguments("dp2", "bf16-distopt", workers=1), 2)
    stock = run_pretrain(arguments("dp2", "bf16-distopt", workers=None), 2, patch="backend-only")
    assert same_state(ours, stock)


def test_options_of_any_group_without_local_sgd_are_refused_instead_of_ignored():
    options = {"outer_optimizer_lr": 0.5, "local_sgd_pseudo_grad_consensus": "sum", "local_sgd_fragments": 2}
    exits = run_failing_pretrain(arguments("single", "fp32", workers=None, **options), 1)
    for flag in ("--outer-optimizer-lr", "--local-sgd-pseudo-grad-consensus", "--local-sgd-fragments"):
        assert f"{flag} has no effect without --use-local-sgd" in exits[0].stderr


def test_a_file_of_rounds_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for options, said in (
        ({"save": str(tmp_path / "file")}, f"--save: rounds cannot be written to {tmp_path / 'file'}"),
        ({"local_sgd_round_log": str(tmp_path)}, f"--local-sgd-round-log {tmp_path} is a folder; name a file"),
    ):
        words = arguments("single", "fp32", workers=2, save_interval=2, **options)
        assert said in run_failing_pretrain(words, 2)[0].stderr


BY_TIME = {"local_sgd_use_async": True, "local_sgd_sync_time": 60.0, "local_sgd_sync_interval": None}


@pytest.mark.parametrize(
    ("option", "others"),
    [("local_sgd_round_log", {}), ("local_sgd_record_meetings", BY_TIME)],
    ids=["rounds", "meetings"],
)
def test_a_folder_that_nobody_made_is_told_at_the_start_and_not_made(tmp_path, option, others):
    file = tmp_path / "mistyped" / "file.jsonl"
    words = arguments("single", "fp32", workers=2, **{option: str(file), **others})
    said = run_failing_pretrain(words, 2)[0].stderr
    assert f"--{option.replace('_', '-')} {file}: there is no folder {file.parent}; make it first" in said
    assert "Traceback" not in said and not file.parent.exists()


def test_a_tracker_file_that_says_nothing_is_an_error_and_no_success(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("garbage")
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, load=str(tmp_path)), 2)
    assert "latest_checkpointed_iteration.txt there holds neither a number nor 'release'" in exits[0].stderr
    assert all(rank.exit_code != 0 for rank in exits)


def test_a_run_that_ends_without_its_checkpoint_as_asked_is_not_a_failure(tmp_path):
    options = {"load": str(tmp_path), "exit_on_missing_checkpoint": True}
    said = run_pretrain(arguments("single", "fp32", workers=2, **options), 2)[0]
    assert "'--exit-on-missing-checkpoint' set" in said.stdout + said.stderr
