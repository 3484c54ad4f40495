# SPDX-License-Identifier: Apache-2.0
"""Invariants 4 and 5: what an outer round does to the weights in the real loop."""

import math
import re
from functools import partial

import pytest

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.runs import arguments, local_run, model_digests, worker_slices
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_pretrain


@pytest.mark.parametrize(
    ("layout", "precision", "workers"),
    [
        ("single", "fp32", 2),
        ("single", "bf16", 3),
        ("dp2", "bf16-distopt-overlap", 2),
        ("tp2", "bf16-distopt", 2),
        ("pp2", "bf16-distopt-overlap", 2),
        ("moe-ep2", "bf16-distopt", 2),
    ],
)
def test_all_workers_hold_equal_weights_after_a_round(layout, precision, workers):
    ranks = local_run(layout, precision, workers=workers, local_sgd_sync_interval=3)
    first, *others = [model_digests(part) for part in worker_slices(ranks, layout, workers)]
    assert all(other == first for other in others)


MAGNITUDE = {
    "local_sgd_pseudo_grad_reducer": "gta",
    "local_sgd_pseudo_grad_consensus": "count",
    "local_sgd_pseudo_grad_sparsification": "magnitude",
    "local_sgd_pseudo_grad_density": 0.3,
}
GUARD = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 3,
    "local_sgd_ewma_alpha": 0.5,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.1,
}


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        ("tp2", "bf16-distopt", {**GUARD, **MAGNITUDE}),
        ("pp2", "bf16", GUARD),
        ("moe-ep2", "bf16-distopt", GUARD),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_worker_that_diverges_is_left_out_on_all_its_ranks(layout, precision, extra):
    run = arguments(layout, precision, workers=2, local_sgd_sync_interval=1, **extra)
    ranks = run_pretrain(run, LAYOUTS[layout].world_size(2), before=worker_one_diverges)
    first, other = (model_digests(part) for part in worker_slices(ranks, layout, 2))
    assert other == first
    said = [line for line in ranks[0].stdout.splitlines() if "anomalous" in line]
    assert len(said) == 1
    assert "outer round 5: left out worker 1, anomalous in embedding, layer.0, layer.1, final_norm" in said[0]
    why = r"\(worker 1, embedding: the norm of its pseudo-gradient is [\d.e+]+, [\d.e+]+ standard deviations above "
    assert re.search(why, said[0])


@pytest.mark.parametrize(
    ("layout", "precision", "codec"),
    [("tp2", "bf16-distopt", "int4"), ("moe-ep2", "fp32-distopt", "topk"), ("pp2", "bf16", "bf16")],
)
def test_all_workers_hold_equal_weights_after_compressed_rounds(layout, precision, codec):
    ranks = local_run(layout, precision, workers=2, local_sgd_sync_interval=3, local_sgd_codec=codec)
    first, other = (model_digests(part) for part in worker_slices(ranks, layout, 2))
    assert other == first


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    [
        ("pp2-vpp2", "bf16-distopt", {"local_sgd_fragments": 4, "global_batch_size": 8}),
        ("moe-ep2", "bf16-distopt-overlap", {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 2}),
    ],
)
def test_every_unit_is_streamed_once_per_interval_under_any_layout(tmp_path, layout, precision, extra):
    options = {"local_sgd_sync_interval": 4, "train_iters": 9, "local_sgd_round_log": str(tmp_path / "rounds")}
    ranks = local_run(layout, precision, workers=2, **options, **extra)
    first, other = (model_digests(part) for part in worker_slices(ranks, layout, 2))
    assert other == first
    rounds = read_rounds(tmp_path / "rounds")
    count = extra["local_sgd_fragments"]
    # Two intervals; the end makes the workers equal without a round.
    assert [entry["fragment"] for entry in rounds] == [*range(count)] * 2
    units = [unit for entry in rounds[:count] for unit in entry["unit_norms"]]
    layers = 4 if "vpp" in layout else 2
    assert sorted(units) == sorted(["embedding", *(f"layer.{index}" for index in range(layers)), "final_norm"])
    assert all(norm > 0 for entry in rounds for norm in entry["unit_norms"].values())


def worker_one_diverges():
    """Make the fifth step of worker 1 a hundred times as long."""
    import functools

    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, optimizer, *args, **kwargs):
        from megatron_ext.seams.process_groups import current_groups

        if kwargs.get("iteration") == 4 and current_groups().worker == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 100
        return original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)

    training.train_step = train_step


def test_a_worker_with_a_non_finite_gradient_is_left_out_of_one_round_and_comes_back():
    run = arguments(
        "single",
        "bf16-distopt",
        workers=2,
        local_sgd_sync_interval=2,
        train_iters=10,
        no_check_for_nan_in_loss_and_grad=True,
        **GUARD,
    )
    ranks = run_pretrain(run, 2, before=gradient_of_worker_one_breaks)
    assert model_digests([ranks[0]]) == model_digests([ranks[1]])
    lines = [line for line in ranks[-1].stdout.splitlines() if "workers: " in line]
    counted = [line.split("workers: ")[1].split(" ")[0] for line in lines]
    # The round after step 4 leaves it out, which the lines say until the next round.
    assert counted == ["2/2", "2/2", "2/2", "1/2", "1/2", "2/2", "2/2", "2/2", "2/2", "2/2"]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_with_a_non_finite_gradient_comes_back_where_fragments_meet_one_by_one(delay):
    run = arguments(
        "single",
        "bf16-distopt",
        workers=2,
        local_sgd_sync_interval=4,
        local_sgd_fragments=2,
        local_sgd_fragment_sync_delay=delay,
        local_sgd_skip_anomaly=True,
        train_iters=14,
        no_check_for_nan_in_loss_and_grad=True,
    )
    ranks = run_pretrain(run, 2, before=gradient_of_worker_one_breaks)
    finite = [math.isfinite(loss) for loss in ranks[1].losses]
    assert all(finite[8:]), ranks[1].losses
    counted = re.findall(r"workers: (\S+)", ranks[-1].stdout)
    assert "1/2" in counted and counted[-4:] == ["2/2"] * 4


def test_norms_count_every_element_once_whoever_holds_copies(tmp_path):
    found = []
    for precision in ("fp32", "fp32-distopt"):
        log = tmp_path / f"{precision}.jsonl"
        clipped = {"local_sgd_round_log": str(log), "local_sgd_clip_pseudo_grad": 0.05}
        run_pretrain(arguments("dp2", precision, workers=2, train_iters=4, local_sgd_sync_interval=2, **clipped), 4)
        found.append([(entry["pseudo_gradient_norm"], *entry["worker_norms"]) for entry in read_rounds(log)])
    for copies, shards in zip(*found, strict=True):
        assert copies == pytest.approx(shards, rel=1e-4)


def gradient_of_worker_one_breaks():
    """Make the gradient of rank 1 NaN in the fourth step."""
    import functools
    import os

    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
        hooked = []
        if kwargs.get("iteration") == 3 and os.environ["RANK"] == "1":
            hooked = [p.register_hook(lambda gradient: gradient * float("nan")) for p in model[0].parameters()]
        try:
            return original(forward_step_func, data_iterator, model, *args, **kwargs)
        finally:
            for handle in hooked:
                handle.remove()

    training.train_step = train_step


def test_workers_differ_between_rounds_so_that_the_equality_means_something():
    ranks = local_run("single", "fp32", workers=2, local_sgd_sync_interval=4)
    assert ranks[0].optimizer != ranks[1].optimizer


SPARSE = {
    "local_sgd_pseudo_grad_reducer": "gta",
    "local_sgd_pseudo_grad_sparsification": "random",
    "local_sgd_pseudo_grad_density": 0.5,
}


TOPK_IN_FRAGMENTS = {"local_sgd_codec": "topk", "local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1}


def embeddings(model, optimizer, args):
    """Probe: digest of the word embedding or of its tied copy on the last stage."""
    import hashlib

    found = [
        parameter.detach().float().cpu().numpy().tobytes()
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if "word_embeddings" in name or "output_layer" in name
    ]
    return [hashlib.md5(data).hexdigest() for data in found]


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        pytest.param("fp32", {}, id="plain", marks=pytest.mark.slow),
        pytest.param("bf16-distopt", {}, id="distributed optimizer", marks=pytest.mark.slow),
        pytest.param("bf16-distopt", {"local_sgd_codec": "int4", **SPARSE}, id="4 bits and sparse"),
        pytest.param("fp32", TOPK_IN_FRAGMENTS, id="topk in fragments", marks=pytest.mark.slow),
    ],
)
def test_tied_embeddings_stay_equal_on_both_stages_with_three_workers(precision, options):
    options = {"local_sgd_sync_interval": 2, "local_sgd_warmup_steps": 2, **options}
    run = arguments("pp2", precision, workers=3, **options)
    ranks = run_pretrain(run, 6, probe=embeddings)
    digests = [rank.probe for rank in ranks]
    assert all(len(digest) == 1 for digest in digests)
    assert len({digest[0] for digest in digests}) == 1


def test_overlapped_communication_changes_no_bit():
    # Without overlap there is one bucket, so shards are cut elsewhere and the gradient's norm adds up in another order.
    options = {"clip_grad": 0.0, "local_sgd_sync_interval": 2}
    plain = local_run("dp2", "bf16-distopt", workers=2, **options)
    overlapped = local_run("dp2", "bf16-distopt-overlap", workers=2, **options)
    assert [rank.parameters for rank in plain] == [rank.parameters for rank in overlapped]


def test_sharded_outer_state_computes_what_the_unsharded_one_does():
    whole = local_run("dp2", "bf16", workers=2, local_sgd_sync_interval=2)
    sharded = local_run("dp2", "bf16-distopt", workers=2, local_sgd_sync_interval=2)
    assert whole[-1].losses == pytest.approx(sharded[-1].losses, rel=1e-3)
    assert sum(len(part) for part in whole[0].optimizer) > 0


def test_sgd_with_interval_one_and_no_momentum_is_synchronous_training():
    common = {"optimizer": "sgd", "sgd_momentum": 0.0, "clip_grad": 0.0, "weight_decay": 0.0, "lr": 0.1}
    synchronous = run_pretrain(
        arguments("single", "fp32", workers=None, **{**common, "global_batch_size": 4}),
        2,
        patch="backend-only",
        probe=weights,
    )
    local = run_pretrain(
        arguments(
            "single",
            "fp32",
            workers=2,
            local_sgd_sync_interval=1,
            outer_optimizer="sgd",
            outer_optimizer_lr=1.0,
            outer_optimizer_momentum=0.0,
            **common,
        ),
        2,
        probe=weights,
    )
    # Summing weights instead of gradients reassociates fp32 additions and nothing else.
    assert local[0].probe == pytest.approx(synchronous[0].probe, rel=1e-5, abs=1e-6)


def weights(model, optimizer, args):
    """Probe: a sample of the weights."""
    return [
        float(value)
        for chunk in model
        for parameter in chunk.parameters()
        for value in parameter.view(-1)[:5]
    ]


@pytest.mark.parametrize("outer", ["none", "adam", "adamw", "torch.optim.Adagrad"])
def test_every_outer_optimizer_trains_and_keeps_workers_equal(outer):
    rate = {} if outer == "none" else {"outer_optimizer_lr": 0.01}
    ranks = local_run("single", "fp32", workers=2, local_sgd_sync_interval=2, outer_optimizer=outer, **rate)
    assert ranks[0].optimizer == ranks[1].optimizer
    assert all(loss == loss for loss in ranks[0].losses)


def test_a_skipped_fp16_step_on_one_worker_does_not_break_lockstep():
    ranks = run_pretrain(
        arguments(
            "single",
            "fp32",
            workers=2,
            fp16=True,
            initial_loss_scale=2.0**15,
            hysteresis=1,
            train_iters=8,
            local_sgd_sync_interval=4,
        ),
        2,
        before=partial(overflow, ranks=[1], iterations=[2]),
    )
    skipped = [[step.skipped for step in rank.record.steps] for rank in ranks]
    assert skipped[0] != skipped[1]
    assert ranks[0].optimizer == ranks[1].optimizer


def test_a_round_after_skipped_steps_alone_reaches_all_ranks_of_the_worker():
    # Megatron gathers parameters in the forward pass only after the first step that was not skipped.
    options = {"initial_loss_scale": 2.0**10, "hysteresis": 1, "train_iters": 2, "local_sgd_sync_interval": 2}
    ranks = run_pretrain(
        arguments("dp2", "bf16-distopt-overlap", workers=2, **{**options, "bf16": False, "fp16": True}),
        4,
        before=partial(overflow, ranks=[0, 1], iterations=[0, 1]),
    )
    assert [[step.skipped for step in rank.record.steps] for rank in ranks] == 2 * [[1, 1]] + 2 * [[0, 0]]
    assert all(rank.parameters == ranks[-1].parameters for rank in ranks)


def test_a_round_in_the_forward_pass_after_skipped_steps_alone_has_the_bits_of_one_after_the_step():
    options = {"initial_loss_scale": 2.0**10, "hysteresis": 1, "train_iters": 3, "local_sgd_sync_interval": 2}
    options |= {"bf16": False, "fp16": True}
    at_once, in_forward = (
        run_pretrain(
            arguments("dp2", "bf16-distopt-overlap", workers=2, local_sgd_sync_in_forward=when, **options),
            4,
            before=partial(overflow, ranks=[0, 1], iterations=[0, 1]),
        )
        for when in (False, True)
    )
    assert [rank.losses for rank in in_forward] == [rank.losses for rank in at_once]
    assert [rank.parameters for rank in in_forward] == [rank.parameters for rank in at_once]


def test_maxima_of_fp8_are_shared_inside_the_worker():
    command = arguments("dp2", "fp32", workers=2, train_iters=1, local_sgd_sync_interval=1)
    ranks = run_pretrain(command, 4, probe=ranks_of_maxima)
    assert [rank.probe for rank in ranks] == 2 * [[[0, 1], [0, 1]]] + 2 * [[[2, 3], [2, 3]]]


def ranks_of_maxima(model, optimizer, args):
    """Probe: the ranks that share the maxima of delayed scaling, without context parallelism and with it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = [parallel_state.get_amax_reduction_group(with_context_parallel=cp) for cp in (False, True)]
    return [dist.get_process_group_ranks(group) for group in groups]


def overflow(ranks, iterations):
    """Make steps of some ranks overflow; iterations count from 0."""
    import functools
    import os

    if int(os.environ["RANK"]) not in ranks:
        return
    import megatron.training.training as training

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, *args, **kwargs):
        if kwargs["iteration"] in iterations:
            parameter = next(model[0].parameters())
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
            try:
                return original(forward_step_func, data_iterator, model, *args, **kwargs)
            finally:
                handle.remove()
        return original(forward_step_func, data_iterator, model, *args, **kwargs)

    training.train_step = train_step


def test_initial_weights_are_made_equal_and_checked():
    ranks = run_pretrain(
        arguments("dp2", "bf16-distopt", workers=2, train_iters=2, local_sgd_sync_interval=2),
        4,
        before=different_initial_weights,
    )
    assert ranks[0].parameters == ranks[2].parameters


def different_initial_weights():
    """Seed every rank differently, as a faulty launch script would."""
    import os

    import megatron.training.initialize as initialize

    original = initialize._set_random_seed

    def seed(number, *args, **kwargs):
        return original(number + int(os.environ["RANK"]) // 2, *args, **kwargs)

    initialize._set_random_seed = seed
