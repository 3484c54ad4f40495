# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are home's: a run resumes from them with the same guests, other ones or none, or with another home."""

import os

import pytest
import torch

from tests.hot_switch.runs import COMMON, arguments, assert_resumed, hot_run, losses
from tests.support.every_run import one_of_each
from tests.support.main_values import main_values
from tests.support.presets import MOE, PRECISIONS, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain
from tests.support.rejected_iterations import write_rejected

HOT = (["1,2,1", "2,1,1", "1,1,2"], [32, 16, 8, 0])
REPLICAS = (["2,1,1", "1,2,1"], [32, 12, 0])
STATIC = (["1,2,1"], [32, 0])
TOLERANCE = 1e-5


def saved(tmp_path, run, **options):
    """Train to iteration 4 with a checkpoint at 2, at which a later run with `load` starts."""
    through = hot_run(*run, train_iters=4, save=os.fspath(tmp_path), save_interval=2, **options)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert len(set(losses(through))) == 4  # a run that does not move would resume exactly, too
    return through


@pytest.mark.parametrize(
    ("hot", "options"),
    [
        pytest.param(HOT, {"use_distributed_optimizer": True}, id="one replica", marks=pytest.mark.slow),
        pytest.param(REPLICAS, {"use_distributed_optimizer": True}, id="two replicas, which draw differently"),
        pytest.param(HOT, {"optimizer": "sgd", "lr": 0.1}, id="SGD", marks=pytest.mark.slow),
        pytest.param(HOT, {"optimizer": "muon", "muon_tp_mode": "duplicated"}, id="Muon", marks=pytest.mark.slow),
        pytest.param(
            REPLICAS,
            {"optimizer": "muon", "use_distributed_optimizer": True},
            id="Muon, layer-wise",
            marks=pytest.mark.slow,
        ),
        pytest.param(REPLICAS, {"ckpt_format": "torch", "use_distributed_optimizer": True}, id="legacy format"),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, hot, options):
    options |= {"bf16": True, "hidden_dropout": 0.1, "attention_dropout": 0.1, "eval_iters": 1, "eval_interval": 3}
    through = saved(tmp_path, hot, **options)
    resumed = hot_run(*hot, train_iters=4, load=os.fspath(tmp_path), **options)
    assert_resumed(resumed, through, after=2)
    assert all("validation loss at iteration 3" in run[-1].stdout for run in (through, resumed))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("torch_dist", "torch"), ("torch", "torch_dist")])
def test_a_resume_from_a_converted_checkpoint_keeps_the_bits(tmp_path, before, after):
    options = {"use_distributed_optimizer": True, "bf16": True, "train_iters": 4}
    first, second = os.fspath(tmp_path / "a"), os.fspath(tmp_path / "b")
    through = hot_run(*REPLICAS, **options, ckpt_format=before, save=first, save_interval=2)
    (tmp_path / "a/latest_checkpointed_iteration.txt").write_text("2")
    converting = {"ckpt_format": before, "load": first, "ckpt_convert_format": after, "ckpt_convert_save": second}
    converted = run_pretrain(arguments(*REPLICAS, **options, **converting), 2)
    assert losses(converted) == [] and f"converted checkpoint: {before} -> {after}" in converted[0].stdout
    # Megatron names the folder after the format.
    resumed = hot_run(*REPLICAS, **options, ckpt_format=after, load=f"{second}/{after}")
    assert_resumed(resumed, through, after=2)
    assert len(set(losses(through))) == 4  # a run that does not move would resume exactly, too


@pytest.mark.slow
def test_a_save_before_the_first_step_that_fp16_does_not_skip_can_be_resumed(tmp_path):
    options = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1, "loss_scale_window": 1000}
    options |= {"train_iters": 14}
    through = hot_run(*HOT, **options, save=os.fspath(tmp_path), save_interval=1)
    skipped = [step.skipped for step in through[0].record.steps]
    assert skipped[0] and not skipped[-1]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert_resumed(hot_run(*HOT, **options, load=os.fspath(tmp_path)), through, after=1)


def test_a_home_with_parts_of_rows_resumes_with_the_same_bits_and_as_one_without(tmp_path):
    # The size holds for all strategies of the list.
    hot = (["1,1,1", "1,1,1"], [32, 12, 0])
    options = {"context_parallel_size": 2, "use_distributed_optimizer": True, "train_iters": 4}
    command = arguments(*hot, **options, save=os.fspath(tmp_path), save_interval=2)
    through = run_pretrain(command, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_pretrain(arguments(*hot, **options, load=os.fspath(tmp_path)), 2)
    assert_resumed(resumed, through, after=2)
    options["context_parallel_size"] = 1
    whole = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options, load=os.fspath(tmp_path))
    assert losses(whole) == pytest.approx(losses(through)[2:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("first", "then"), one_of_each([(HOT, STATIC), (STATIC, HOT)], {0}), ids=["hot to static", "static to hot"]
)
def test_a_run_resumes_with_other_guests_or_none(tmp_path, first, then):
    through = saved(tmp_path, first)
    resumed = hot_run(*then, train_iters=4, load=os.fspath(tmp_path))
    assert losses(resumed) == pytest.approx(losses(through)[2:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({}, TOLERANCE, id="Adam"),
        pytest.param(
            {"optimizer": "muon", "muon_tp_mode": "duplicated", "bf16": True},
            3e-3,
            id="Muon, layer-wise",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_another_home_resumes_from_a_reshardable_checkpoint(tmp_path, options, tolerance):
    options |= {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
    through = saved(tmp_path, HOT, **options)
    resumed = hot_run(["2,1,1", "1,2,1"], [32, 8, 0], train_iters=4, load=os.fspath(tmp_path), **options)
    assert losses(resumed) == pytest.approx(losses(through)[2:], abs=tolerance)


def test_a_vocabulary_of_other_rows_is_refused_with_the_padding_that_fits(tmp_path):
    options = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
    options |= {"make_vocab_size_divisible_by": 64, "vocab_size": 61}
    other = ["1,2,1", "1,1,2"], [32, 8, 0]
    through = saved(tmp_path, (["2,1,1", "1,1,2"], [32, 8, 0]), **options)
    options |= {"train_iters": 4, "load": os.fspath(tmp_path)}
    said = run_failing_pretrain(arguments(*other, **options), 2)[0].stderr
    assert "was padded to 64 rows and this run's is padded to 128, over all of which the loss is taken" in said
    assert "give --make-vocab-size-divisible-by 32\n" in said and "Traceback" not in said
    resumed = hot_run(*other, **{**options, "make_vocab_size_divisible_by": 32})
    assert losses(resumed) == pytest.approx(losses(through)[2:], abs=TOLERANCE)


def test_what_puts_other_sequences_in_the_place_of_the_next_ones_is_said(tmp_path):
    saved(tmp_path, HOT)
    run = hot_run(*HOT, train_iters=4, load=os.fspath(tmp_path), seed=99, mock_data=True)
    assert "--seed was 1234 in the run that saved and is 99: the order of sequences is another" in run[0].stdout
    assert "--seq-length was" not in run[0].stdout and run[0].stdout.count("the order of sequences") == 1


@pytest.mark.slow
def test_a_checkpoint_whose_samples_were_megatrons_own_is_said_to_be_one(tmp_path):
    options = {**COMMON, "train_iters": 4, "tensor_model_parallel_size": 2}
    run_pretrain(toy_gpt(options, save=os.fspath(tmp_path), save_interval=2), 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    run = hot_run(*HOT, train_iters=4, load=os.fspath(tmp_path))
    assert "the run that saved had none: its 16 samples were Megatron's own" in run[0].stdout
    assert "16 read before" in run[0].stdout


EXPERTS = {**MOE, "moe_aux_loss_coeff": 0.0, "disable_bias_linear": True}


@pytest.mark.parametrize(
    ("first", "then", "options"),
    one_of_each(
        [
            ("{dp: 1, tp: 2, pp: 1}", "{dp: 1, tp: 1, pp: 2, vpp: 2}", {}),
            ("{dp: 1, tp: 1, pp: 2, vpp: 2}", "{dp: 1, tp: 1, pp: 2, first_stage_layers: 1}", {}),
            ("{dp: 4, tp: 1, pp: 1, ep: 4}", "{dp: 2, tp: 1, pp: 2, ep: 2}", EXPERTS),
        ],
        {2},
    ),
    ids=["interleaved", "uneven", "experts"],
)
def test_homes_with_other_stages_or_experts_resume_from_one_too(tmp_path, first, then, options):
    file = tmp_path / "strategies.yaml"
    options = {**COMMON, **options, "num_layers": 4, "train_iters": 4, "hot_switch_strategy_file": os.fspath(file)}
    options |= {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}

    ranks = 4 if "dp: 4" in first else 2

    def run(home, **others):
        file.write_text(f"bucket_sizes: [32, 12, 0]\nstrategies: [{home}, {{dp: {ranks}, tp: 1, pp: 1}}]\n")
        return losses(run_pretrain(toy_gpt(options, **others), ranks))

    through = run(first, save=os.fspath(tmp_path), save_interval=2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert run(then, load=os.fspath(tmp_path)) == pytest.approx(through[2:], abs=TOLERANCE)
    assert len(set(through)) == 4


@pytest.mark.parametrize("home", one_of_each(["1,2,1", "2,1,1"], {1}), ids=["same home", "another home"])
def test_the_weights_alone_begin_with_a_fresh_optimizer(tmp_path, home):
    options = {"use_distributed_optimizer": True, "train_iters": 4}
    saved(tmp_path, HOT, use_distributed_optimizer=True)
    resumed = hot_run(*HOT, load=os.fspath(tmp_path), **options)
    fresh = hot_run([home, "1,1,2"], [32, 8, 0], load=os.fspath(tmp_path), no_load_optim=True, **options)
    assert losses(fresh)[0] == pytest.approx(losses(resumed)[0], abs=TOLERANCE)
    assert abs(losses(fresh)[1] - losses(resumed)[1]) > 10 * TOLERANCE  # Adam's moments begin fresh


@pytest.mark.slow
def test_main_values_in_fp32_are_those_of_a_checkpoint_in_fp32(tmp_path):
    files = {"ckpt_format": "torch", "load": os.fspath(tmp_path), "save": os.fspath(tmp_path), "save_interval": 2}
    stock = toy_gpt(COMMON, files, tensor_model_parallel_size=2, train_iters=2)
    saved = run_pretrain(stock, 2, patch="backend-only", probe=main_values)
    # The guest alone trains; a step this small changes no weight.
    options = {**files, "no_load_optim": True, "load_main_params_from_ckpt": True, "lr": 1e-30, "weight_decay": 0.0}
    hot = arguments(["1,2,1", "2,1,1"], [32, 30, 0], **PRECISIONS["bf16-distopt"], **options, train_iters=4)
    loaded = run_pretrain(hot, 2, probe=main_values)
    assert [rank.probe for rank in loaded] == [rank.probe for rank in saved]


@pytest.mark.parametrize(
    "before", one_of_each([["1,2,1"], None], {1}), ids=["hot switching before", "stock Megatron before"]
)
def test_finetuning_begins_with_the_first_sequence(tmp_path, before):
    options = {"use_distributed_optimizer": True}
    save = {"train_iters": 2, "lr": 0.1, "save": os.fspath(tmp_path), "save_interval": 2}
    if before is None:
        run_pretrain(toy_gpt(COMMON, options, tensor_model_parallel_size=2, **save), 2, patch="backend-only")
    else:
        hot_run(before, [32, 0], **options, **save)
    options |= {"train_iters": 4, "load": os.fspath(tmp_path), "finetune": True}
    # Another home, too: nothing of the optimizer is read.
    runs = [hot_run(*STATIC, **options), hot_run(*HOT, **options), hot_run(["2,1,1", "1,1,2"], [32, 8, 0], **options)]
    assert all("8 per step, 0 read before" in run[0].stdout for run in runs)
    assert all([step.iteration for step in run[0].record.steps] == [1, 2, 3, 4] for run in runs)
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), abs=TOLERANCE)
    untrained = hot_run(*STATIC, train_iters=4)
    assert abs(losses(untrained)[0] - losses(runs[0])[0]) > 0.01  # the weights that were loaded


def test_another_home_is_refused_by_name_without_one(tmp_path):
    options = {"use_distributed_optimizer": True}
    saved(tmp_path, STATIC, **options)
    for home in (["2,1,1", "1,2,1"], ["1,1,2", "1,2,1"]):
        run = arguments(home, [32, 8, 0], train_iters=4, load=os.fspath(tmp_path), **options)
        exits = run_failing_pretrain(run, 2)
        said = exits[0].stderr
        assert "saved with --tensor-model-parallel-size 2, this run has 1" in said
        assert "--dist-ckpt-optim-fully-reshardable, or start the optimizers fresh with --no-load-optim" in said
        assert "Traceback" not in said and all(rank.exit_code != 0 for rank in exits)


def test_homes_that_differ_in_other_ways_are_refused_by_name(tmp_path):
    file = tmp_path / "strategies.yaml"
    options = {**COMMON, "use_distributed_optimizer": True, "num_layers": 4, "train_iters": 2}

    def command(home, **others):
        file.write_text(f"bucket_sizes: [32, 0]\nstrategies: [{home}]\n")
        return toy_gpt(options, hot_switch_strategy_file=os.fspath(file), **others)

    run_pretrain(command("{dp: 1, tp: 1, pp: 2}", save=os.fspath(tmp_path), save_interval=2), 2)
    for home, said in (
        ("{dp: 1, tp: 1, pp: 2, vpp: 2}", "saved with a virtual pipeline size of None, this run has 2"),
        ("{dp: 1, tp: 1, pp: 2, first_stage_layers: 1}", "saved with --decoder-first-pipeline-num-layers None"),
    ):
        exits = run_failing_pretrain(command(home, load=os.fspath(tmp_path)), 2)
        assert said in exits[0].stderr
        assert "Traceback" not in exits[0].stderr and all(rank.exit_code != 0 for rank in exits)


def test_a_home_whose_experts_have_an_optimizer_of_their_own_and_one_whose_have_not_are_two(tmp_path):
    file = tmp_path / "strategies.yaml"
    options = {**COMMON, **EXPERTS, "train_iters": 4, "dist_ckpt_optim_fully_reshardable": True}
    options |= {"use_distributed_optimizer": True, "hot_switch_strategy_file": os.fspath(file)}

    def command(ep, **others):
        file.write_text(f"bucket_sizes: [32, 0]\nstrategies: [{{dp: 2, tp: 1, pp: 1, ep: {ep}}}]\n")
        return toy_gpt(options, **others)

    for before, now in ((2, 1), (1, 2)):
        folder = os.fspath(tmp_path / str(before))
        run_pretrain(command(before, train_iters=2, save=folder, save_interval=2), 2)
        exits = run_failing_pretrain(command(now, load=folder), 2)
        assert f"saved with --expert-model-parallel-size {before}, this run has {now}" in exits[0].stderr
        assert "Traceback" not in exits[0].stderr and all(rank.exit_code != 0 for rank in exits)
    assert len(losses(run_pretrain(command(2, load=folder, no_load_optim=True), 2))) == 2


def test_a_file_that_one_rank_alone_cannot_read_ends_the_run_with_its_name(tmp_path):
    options = {"use_distributed_optimizer": True, "train_iters": 2}
    hot_run(*HOT, save=os.fspath(tmp_path), save_interval=2, **options)
    (damaged,) = (tmp_path / "iter_0000002").glob("__1_0.distcp")
    damaged.write_bytes(damaged.read_bytes()[:500])
    exits = run_failing_pretrain(arguments(*HOT, load=os.fspath(tmp_path), **options), 2, timeout=60)
    said = f"the checkpoint cannot be read: {damaged} has 500 bytes instead of "
    assert any(said in rank.stderr and "--ckpt-step" in rank.stderr for rank in exits)


def test_options_for_keeping_and_reading_checkpoints(tmp_path):
    keeping = {
        "save": os.fspath(tmp_path),
        "save_interval": 1,
        "save_retain_interval": 2,
        "no_save_rng": True,
        "no_ckpt_fully_parallel_save": True,
        "ckpt_assume_constant_structure": True,
        "dist_ckpt_workers": 2,
        "verify_integrity": True,
        "log_progress": True,
    }
    reading = {
        "load": os.fspath(tmp_path),
        "ckpt_step": 2,
        "no_load_rng": True,
        "ckpt_fully_parallel_load": True,
        "dist_ckpt_strictness": "raise_unexpected",
        "no_ckpt_load_validate_sharding_integrity": True,
        "auto_detect_ckpt_format": True,
        "exit_on_missing_checkpoint": True,
        "verify_integrity": True,
    }
    through = run_pretrain(arguments(*HOT, train_iters=4, use_distributed_optimizer=True, **keeping), 2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert (tmp_path / "progress.txt").read_text().count("Saved checkpoint") == 4
    resumed = run_pretrain(arguments(*HOT, train_iters=4, use_distributed_optimizer=True, **reading), 2)
    assert losses(resumed) == losses(through)[2:]
    assert [rank.optimizer for rank in resumed] == [rank.optimizer for rank in through]


WRITING = {
    "save_interval": 1,
    "dist_ckpt_optim_fully_reshardable": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "ckpt_fully_parallel_save_process_group": "ep_dp",
    "dist_ckpt_save_pre_mcore_014": True,
    "save_params_interval": 2,
    "save_wgrads_interval": 2,
}
TAKING = {
    "ckpt_step": 2,
    "ckpt_fully_parallel_load": True,
    "ckpt_fully_parallel_load_process_group": "ep_dp",
    "ckpt_fully_parallel_load_exchange_algo": "gather_object",
    "use_checkpoint_args": True,
    "use_mp_args_from_checkpoint_args": True,
}


def test_options_for_writing_and_taking_checkpoints_in_other_ways(tmp_path):
    options = {"train_iters": 4, "use_distributed_optimizer": True}
    through = run_pretrain(arguments(*REPLICAS, **options, save=os.fspath(tmp_path), **WRITING), 2)
    resumed = run_pretrain(arguments(*REPLICAS, **options, load=os.fspath(tmp_path), **TAKING), 2)
    assert_resumed(resumed, through, after=2)


def dumps(folder):
    """Return what --save-params-interval and --save-wgrads-interval wrote, by what it is and where."""
    return {os.fspath(path.relative_to(folder)): torch.load(path)["model_chunk0"] for path in folder.rglob("*.pth")}


@pytest.mark.slow
def test_dumps_have_the_gradients_of_all_strategies(tmp_path):
    options = {"train_iters": 1, "save_interval": 100, "save_params_interval": 1, "save_wgrads_interval": 1}
    options |= {"use_distributed_optimizer": True}
    hot_run(*REPLICAS, **options, save=os.fspath(tmp_path / "hot"))
    hot_run(["2,1,1"], [32, 0], **options, save=os.fspath(tmp_path / "static"))
    hot, static = dumps(tmp_path / "hot"), dumps(tmp_path / "static")
    assert hot.keys() == static.keys() and {name.split("/")[0] for name in hot} == {"params", "wgrads"}
    for file in hot:
        assert hot[file].keys() == static[file].keys() and len(hot[file]) > 20
        for name, value in hot[file].items():
            assert torch.allclose(value, static[file][name], atol=1e-4 if file.startswith("params") else 1e-5), name
    assert any(float(value.abs().max()) > 1e-3 for value in hot[next(iter(sorted(hot, reverse=True)))].values())


def test_the_place_in_the_data_follows_an_iteration_that_is_overridden(tmp_path):
    saved(tmp_path, REPLICAS)
    options = {"train_iters": 4, "load": os.fspath(tmp_path)}
    again = hot_run(*REPLICAS, **options, override_ckpt_iteration=0)
    assert "8 per step, 0 read before" in again[0].stdout
    assert [step.iteration for step in again[0].record.steps] == [1, 2, 3, 4]
    from_the_first = hot_run(*REPLICAS, **options, finetune=True)
    assert losses(again)[0] == losses(from_the_first)[0]
    assert losses(again)[1] != losses(from_the_first)[1]  # with the optimizer of the checkpoint


@pytest.mark.slow
def test_skipped_iterations_read_their_sequences(tmp_path):
    options = {"train_iters": 4, "lr": 1e-30, "weight_decay": 0.0}  # steps change no weight
    whole = hot_run(*REPLICAS, **options)
    saving = {"save": os.fspath(tmp_path), "save_interval": 100, "exit_interval": 2}
    lasting = {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 1}
    skipping = hot_run(*REPLICAS, **options, **saving, **lasting, iterations_to_skip=[1, 3])
    assert losses(skipping) == losses(whole)[1:2]
    # Megatron takes those that a run before found wanting from a file of it.
    from_file = {"result_rejected_tracker_filename": write_rejected(tmp_path / "rejected", 1, 3)}
    resumed = hot_run(*REPLICAS, **options, **lasting, load=os.fspath(tmp_path), **from_file)
    assert losses(resumed) == losses(whole)[3:]


@pytest.mark.slow
def test_weights_saved_without_an_optimizer_begin_another_run_with_any_home(tmp_path):
    options = {"use_distributed_optimizer": True, "train_iters": 2}
    hot_run(*HOT, **options, lr=0.1, save=os.fspath(tmp_path), save_interval=2, no_save_optim=True)
    begun = {**options, "load": os.fspath(tmp_path / "none"), "pretrained_checkpoint": os.fspath(tmp_path)}
    runs = [hot_run(*home, **begun) for home in (HOT, (["2,1,1", "1,1,2"], [32, 8, 0]))]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=TOLERANCE)
    untrained = hot_run(*HOT, **options)
    assert abs(losses(untrained)[0] - losses(runs[0])[0]) > 0.01  # the weights that were loaded
