# SPDX-License-Identifier: Apache-2.0
"""Options of Megatron in bundles: workers apart, rounds, a save and a resume with all of a bundle at once."""

import re

import pytest

from tests.local_sgd.runs import arguments, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.option_bundles import (
    LAID_OUT,
    MODELS,
    WITH_FILES,
    changed_values,
    listed_values,
    options_with_files,
)
from tests.support.presets import LAYOUTS
from tests.support.pretrain import as_worker, run_pretrain
from tests.support.rejected_iterations import write_rejected
from tests.sync_service.jobs import remember_samples

PRECISION = "bf16-distopt-overlap"
# Rounds after iterations 2 and 4; what is resumed was saved between them.
SCHEDULE = {"train_iters": 4, "local_sgd_sync_interval": 2}
RESUMED = 3
# What one worker's job must ask for to get the samples that both workers read.
AS_MANY_SAMPLES = {"train_iters": 8}

# What a job of two workers has otherwise than that of one of them here.
CHANGED = {
    *("world_size", "data_parallel_size", "inprocess_active_world_size", "global_batch_size", "eval_global_batch_size"),
    *("train_iters", "exit_interval", "save", "save_interval"),
    "rerun_mode",  # local SGD repeats no step
    "bias_swiglu_fusion",  # a default of runs on CPU
}

MAPPING = {"use_tp_pp_dp_mapping": True}
# Thresholds are in tokens, 32 to a sample: steps of 8, 8, 16 and 16 samples.
GROWING = {
    "step_batch_size_schedule": "0:8 512:16",
    "global_batch_size": None,
    "train_iters": None,
    "train_samples": 48,
    "lr_decay_samples": 48,
}
# Micro-batches of 2 samples on 4 replicas: steps have 24 samples, and leave 6 out.
SMALLER = {"decrease_batch_size_if_needed": True, "global_batch_size": 30, "eval_global_batch_size": 32}
START = {"data_parallel_random_init": True, **GROWING}
ACCUMULATION = {"grad_reduce_in_bf16": True, "ddp_param_name_patterns_for_fp32_local_accumulation": ["all"]}
HASHES = {"check_weight_hash_across_dp_replicas_interval": 1}

BUNDLES = {
    "--use-tp-pp-dp-mapping": ("pp2", 1, MAPPING),
    "--use-tp-pp-dp-mapping, two replicas to a worker": ("pp2", 2, {**MAPPING, "global_batch_size": 8}),
    "--data-parallel-random-init --step-batch-size-schedule": ("dp2", 2, START),
    "--decrease-batch-size-if-needed": ("dp2", 2, SMALLER),
    "--ddp-param-name-patterns-for-fp32-local-accumulation": ("dp2", 2, ACCUMULATION),
    "--check-weight-hash-across-dp-replicas-interval": ("dp2", 2, HASHES),
}
"""Layout, data-parallel size of a worker, options. Each worker's ranks are neighbours in all of them."""


def world_size(layout, replicas):
    return 2 * replicas * (2 if layout == "pp2" else 1)


@pytest.mark.parametrize("bundle", BUNDLES)
def test_rounds_and_a_resume_with_the_option(tmp_path, bundle):
    layout, replicas, extra = BUNDLES[bundle]
    options, size = {**SCHEDULE, **extra}, world_size(layout, replicas)
    run = arguments(layout, PRECISION, workers=2, save=str(tmp_path), save_interval=1, **options)
    whole = run_pretrain(run, size)
    first, second = whole[: size // 2], whole[size // 2 :]
    assert first[-1].losses != second[-1].losses
    assert len(whole[-1].losses) == 4
    in_force = listed_values(whole[0].stdout)
    assert {name: in_force[name] for name, value in extra.items() if value is True and in_force[name] != "True"} == {}
    assert [rank.parameters for rank in first] == [rank.parameters for rank in second]
    if "step_batch_size_schedule" in extra:
        batches = re.findall(r"global batch size: +(\d+) \|", whole[-1].stdout)
        assert batches == ["8", "8", "16", "16"]
    if extra is HASHES:  # also in steps after which the workers differ
        assert [f"hashes match after {step} iterations" in whole[0].stdout for step in range(1, 5)] == [True] * 4
    resumed = run_pretrain(
        arguments(layout, PRECISION, workers=2, load=str(tmp_path), ckpt_step=RESUMED, **options), size
    )
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[RESUMED:] for rank in whole]


@pytest.mark.parametrize("bundle", [name for name in BUNDLES if "mapping" in name])
def test_workers_that_never_meet_equal_separate_jobs_in_another_order_of_ranks(bundle):
    layout, replicas, extra = BUNDLES[bundle]
    options = {**extra, "train_iters": 3}
    size = world_size(layout, replicas)
    together = run_pretrain(arguments(layout, PRECISION, workers=2, local_sgd_sync_interval=1000, **options), size)
    if "global_batch_size" in options:
        options["global_batch_size"] //= 2
    for worker in range(2):
        ranks = together[worker * size // 2 : (worker + 1) * size // 2]
        run = arguments(layout, PRECISION, workers=None, **options)
        alone = run_pretrain(run, size // 2, patch="backend-only", before=as_worker(worker, 2))
        assert model_digests(ranks) == model_digests(alone)
        assert [rank.losses for rank in ranks] == [rank.losses for rank in alone]


@pytest.mark.parametrize("bundle", one_of_each([*MODELS, *LAID_OUT, *WITH_FILES], {0, 4, 12}))
def test_a_worker_is_a_stock_job_until_a_round_and_a_resume_keeps_the_bits(tmp_path, bundle):
    layout, options = LAID_OUT.get(bundle, ("single", MODELS.get(bundle, {})))
    if bundle in WITH_FILES:
        options = options_with_files(bundle, tmp_path)

    def run(**where):
        words = arguments(layout, PRECISION, workers=2, batch=4, **SCHEDULE, **options, **where)
        return run_pretrain(words, LAYOUTS[layout].world_size(2))

    whole = run(save=str(tmp_path / "saved"), save_interval=1)
    workers = worker_slices(whole, layout, 2)
    if "moe_routing_trace_path" in options:
        records = sorted(path.name for path in (tmp_path / "routed").iterdir())
        assert records == [f"router_trace_rank{rank}.jsonl" for rank in range(2)]
    assert [rank.parameters for rank in workers[0]] == [rank.parameters for rank in workers[1]]
    for worker, ranks in enumerate(workers):
        alone = run_pretrain(
            arguments(layout, PRECISION, workers=None, batch=4, **AS_MANY_SAMPLES, exit_interval=2, **options),
            LAYOUTS[layout].world_size(1),
            patch="backend-only",
            before=as_worker(worker, 2),
        )
        assert [rank.losses[:2] for rank in ranks] == [rank.losses for rank in alone]
        assert changed_values(whole[0].stdout, alone[0].stdout).keys() <= CHANGED
    assert workers[0][-1].losses != workers[1][-1].losses
    resumed = run(load=str(tmp_path / "saved"), ckpt_step=RESUMED)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[RESUMED:] for rank in whole]


STREAMING = {
    "local_sgd_fragments": 2,
    "local_sgd_sync_interval": 4,
    "local_sgd_fragment_sync_delay": 3,
    "local_sgd_fragment_update_alpha": 0.5,
}


def test_skipped_iterations_are_no_steps_and_a_resume_keeps_the_bits(tmp_path):
    """Also: a file of iterations to skip, checkpoints that replace each other, a skipped end where workers drift."""
    options = {**STREAMING, "train_iters": 8, "iterations_to_skip": [3, 8]}
    saving = {"save": str(tmp_path), "save_interval": 100}
    lasting = {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 1}
    whole = run_pretrain(arguments("dp2", PRECISION, workers=2, **options), 4)
    assert [step.iteration for step in whole[0].record.steps] == [1, 2, 4, 5, 6, 7]
    first, second = whole[:2], whole[2:]
    assert [rank.parameters for rank in first] == [rank.parameters for rank in second]
    begun = {**options, **saving, **lasting, "exit_interval": 5}
    run_pretrain(arguments("dp2", PRECISION, workers=2, **begun), 4)
    # What ends a run is a lasting one.
    resumed = {**options, **lasting, "load": str(tmp_path), "iterations_to_skip": None}
    resumed["result_rejected_tracker_filename"] = write_rejected(tmp_path / "rejected", 3, 8)
    kept = sorted(path.name for path in (tmp_path / "non_persistent").glob("iter_*"))
    assert kept == ["iter_0000004", "iter_0000005"]
    ended = run_pretrain(arguments("dp2", PRECISION, workers=2, **resumed), 4)
    assert same_state(ended, whole)
    assert [rank.losses for rank in ended] == [rank.losses[4:] for rank in whole]


def samples_read(model, optimizer, args):
    """Probe: the indices of the training samples that this rank has read."""
    return args.samples_seen


def test_each_phase_begins_with_the_first_samples_and_a_resume_keeps_the_bits(tmp_path):
    options = {"train_iters": None, "train_samples": 32, "lr_decay_samples": 32, "phase_transition_iterations": "2"}

    def run(**where):
        words = arguments("single", PRECISION, workers=2, batch=4, **{**SCHEDULE, **options, **where})
        return run_pretrain(words, 2, before=remember_samples, probe=samples_read)

    first = run(save=str(tmp_path), save_interval=100)
    second = run(save=str(tmp_path), load=str(tmp_path), save_interval=1)
    assert [[step.iteration for step in ranks[0].record.steps] for ranks in (first, second)] == [[1, 2], [3, 4]]
    for ranks in (first, second):
        assert sorted(ranks[0].probe + ranks[1].probe) == list(range(16))
        assert ranks[0].parameters == ranks[1].parameters
    resumed = run(load=str(tmp_path), ckpt_step=RESUMED)
    assert same_state(resumed, second)
    assert [rank.losses for rank in resumed] == [rank.losses[1:] for rank in second]
