# SPDX-License-Identifier: Apache-2.0
"""Muon and its family inside: on every replica, or layer-wise, where replicas share whole parameters out."""

from functools import partial

import pytest

from tests.local_sgd.runs import arguments, local_run, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS
from tests.support.pretrain import as_worker, run_failing_pretrain, run_pretrain
from tests.transport.meter import crossing_calls, install_meter

# Synchronous at first; rounds after iterations 3 and 5.
ROUNDS = {"train_iters": 5, "local_sgd_warmup_steps": 1, "local_sgd_sync_interval": 2}
RESUMED = 4
"""In mid-interval, with an outer momentum."""

LAYER_WISE = "bf16-distopt"
KINDS = {
    "muon": ("single", "fp32", {"optimizer": "muon"}),
    "muon over tensor ranks": ("tp2", "bf16", {"optimizer": "muon", "muon_tp_mode": "duplicated"}),
    "layer-wise": ("dp2", LAYER_WISE, {"optimizer": "muon"}),
    "layer-wise, gathered late": ("dp2", "bf16-distopt-overlap", {"optimizer": "muon", "muon_nesterov": True}),
    "lion": ("single", "bf16", {"optimizer": "lion"}),
    "lion beside muon": ("dp2", "bf16", {"optimizer": "dist_muon", "muon_scalar_optimizer": "lion"}),
    "experts": ("moe-ep2", "bf16", {"optimizer": "muon"}),
    "layer-wise experts": ("moe-ep2", LAYER_WISE, {"optimizer": "muon"}),
}
NEVER = {"train_iters": 3, "local_sgd_sync_interval": 1000}


@pytest.mark.parametrize("kind", one_of_each(list(KINDS), {0, 5, 7}))
def test_a_resume_in_mid_interval_keeps_the_bits_and_rounds_leave_workers_equal(tmp_path, kind):
    layout, precision, extra = KINDS[kind]
    options = {**ROUNDS, **extra}
    whole = local_run(layout, precision, workers=2, save=str(tmp_path), save_interval=RESUMED, **options)
    first, second = worker_slices(whole, layout, 2)
    assert first[-1].losses[-1] != second[-1].losses[-1]
    assert model_digests(first) == model_digests(second)
    resumed = local_run(layout, precision, workers=2, load=str(tmp_path), ckpt_step=RESUMED, **options)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[RESUMED:] for rank in whole]


APART = ["muon", "muon over tensor ranks", "layer-wise", "layer-wise, gathered late", "experts", "soap"]


@pytest.mark.parametrize("kind", one_of_each(APART, {1, 4}))
def test_a_worker_that_never_meets_another_is_a_stock_job(kind):
    layout, precision, extra = KINDS.get(kind, ("single", "fp32", {"optimizer": "soap"}))
    run = arguments(layout, precision, workers=2, **NEVER, **extra)
    together = run_pretrain(run, LAYOUTS[layout].world_size(2))
    for worker, ranks in enumerate(worker_slices(together, layout, 2)):
        stock = arguments(layout, precision, workers=None, train_iters=3, **extra)
        alone = run_pretrain(
            stock, LAYOUTS[layout].world_size(1), patch="backend-only", before=as_worker(worker, 2)
        )
        assert model_digests(ranks) == model_digests(alone)
        assert [rank.grad_norms for rank in ranks] == [rank.grad_norms for rank in alone]
        assert [rank.losses for rank in ranks] == [rank.losses for rank in alone]


@pytest.mark.parametrize("option", [{}, {"log_num_zeros_in_grad": True}], ids=["", "zeros counted"])
def test_layer_wise_steps_without_a_round_cross_workers_zero_times(option):
    run = arguments(
        "dp2",
        LAYER_WISE,
        workers=2,
        train_iters=6,
        local_sgd_sync_interval=3,
        log_interval=100,
        optimizer="muon",
        **option,
    )
    for rank in run_pretrain(run, 4, before=install_meter, probe=crossing_calls):
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [2, 5], rank.probe


def owned(model, optimizer, args):
    """Probe: names of the parameters of which this rank has the fp32 values, and of all that are trained."""
    from megatron_ext.params import ParameterView
    from megatron_ext.params.optimizer_shards import dp_shards

    shards = dp_shards(optimizer, ParameterView.from_model(model))
    assert all(shard.numel in (0, shard.entry.parameter.numel()) for shard in shards)
    return [shard.entry.tensor.name for shard in shards if shard.numel], [shard.entry.tensor.name for shard in shards]


def test_every_parameter_has_one_owner_among_the_replicas_of_a_layer_wise_optimizer():
    run = arguments("dp2", LAYER_WISE, workers=2, train_iters=1, local_sgd_sync_interval=1, optimizer="muon")
    ranks = run_pretrain(run, 4, probe=owned)
    for pair in (ranks[:2], ranks[2:]):
        (first, every), (second, same) = (rank.probe for rank in pair)
        assert first and second and every == same
        assert sorted([*first, *second]) == sorted(every)


def failure(*options, **named):
    """Return what the first rank of a run says that ends in an error."""
    return run_failing_pretrain(arguments(*options, **named), 2)[0].stderr


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_in_one_line(tmp_path):
    sync = {"local_sgd_sync_interval": 1, "train_iters": 1}
    first = {**sync, "save": str(tmp_path), "save_interval": 1, "optimizer": "muon"}
    run_pretrain(arguments("single", "bf16", workers=2, **first), 2)
    more = {**sync, "train_iters": 2, "load": str(tmp_path)}
    for precision, other, now in (
        ("bf16", {}, "--optimizer adam,"),
        ("bf16-distopt", {"optimizer": "muon"}, "--optimizer muon --muon-scalar-optimizer adam --use-distributed-opt"),
        ("bf16", {"optimizer": "muon", "muon_scalar_optimizer": "lion"}, "--muon-scalar-optimizer lion,"),
    ):
        said = failure("single", precision, workers=2, **more, **other)
        assert "Traceback" not in said
        assert "saved with --optimizer muon --muon-scalar-optimizer adam, this run has" in said
        assert now in said and "--no-load-optim" in said
    fresh = run_pretrain(arguments("single", "bf16", workers=2, no_load_optim=True, **more), 2)
    assert len(fresh[-1].losses) == 1


def forget_package(found):
    """Instrument: let the package be of another version, or not there."""
    from importlib import metadata

    from megatron_ext.options import optimizer_package

    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    optimizer_package.version = version


@pytest.mark.parametrize(("found", "said"), [(None, "which is not installed"), ("999.0.0", "which is 999.0.0")])
def test_without_the_package_a_run_ends_at_its_start_in_one_line(found, said):
    run = arguments("single", "bf16", workers=2, optimizer="muon")
    (error, _) = (
        rank.stderr for rank in run_failing_pretrain(run, 2, before=partial(forget_package, found))
    )
    assert f"--optimizer muon needs emerging-optimizers>=0.2,<1, {said}; pip install 'emerging-optimizers==" in error
    assert "Traceback" not in error


def test_what_megatron_cannot_do_with_them_is_refused():
    fp32 = failure("single", "fp32-distopt", workers=2, optimizer="muon")
    assert "layer-wise optimizer, which it takes then, cannot train in fp32; add --bf16" in fp32
    adaptive = failure("single", "bf16", workers=2, optimizer="adaptive_muon")
    assert "--optimizer adaptive_muon is not supported: it lacks in Megatron a scale" in adaptive
    soap = failure("single", "bf16", workers=2, optimizer="soap", save="folder", save_interval=1)
    assert "--optimizer soap with --save is not supported: Megatron cannot write its state" in soap
