# SPDX-License-Identifier: Apache-2.0
"""Workers that are shard groups of torch's FSDP2 (--use-torch-fsdp2): EDiT's form, a shard group times a sync group."""

import pytest

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.runs import arguments, local_run, model_digests, same_state, worker_slices
from tests.support.presets import Options
from tests.support.pretrain import as_worker, run_failing_pretrain, run_pretrain
from tests.transport.meter import crossing_calls, install_meter

UNTIED: Options = {"untie_embeddings_and_output_weights": True}
FSDP2: Options = {**UNTIED, "use_torch_fsdp2": True}
GATED: Options = {**FSDP2, "swiglu": True, "disable_bias_linear": True}
GUARDED: Options = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.05,
}
MOE: Options = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
    "disable_bias_linear": True,
}


def whole_weights(model, optimizer, args):
    """Probe: every parameter as a whole, whoever holds its rows."""
    from torch.distributed.tensor import DTensor

    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().float().clone()
        for chunk in model
        for name, value in chunk.named_parameters()
    }


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="default"),
        pytest.param({"local_sgd_warmup_steps": 2, **GUARDED}, id="warmup-penalty"),
        pytest.param({"outer_optimizer": "none", **MOE}, id="experts", marks=pytest.mark.slow),
    ],
)
def test_workers_that_shard_their_weights_do_what_whole_ones_do(tmp_path, extra):
    runs, logs = [], []
    for kind in (UNTIED, FSDP2):
        log = tmp_path / f"{len(runs)}.jsonl"
        # Adam would make as large a step of the rounding of a gradient that is zero.
        options = {"optimizer": "sgd", "lr": 0.1, "local_sgd_sync_interval": 2, "local_sgd_round_log": str(log)}
        options |= {**kind, **extra}
        runs.append(run_pretrain(arguments("dp2", "fp32", workers=2, **options), 4, probe=whole_weights))
        logs.append(list(read_rounds(log)))
    whole, sharded = runs
    first, other = (model_digests(part) for part in worker_slices(sharded, "dp2", 2))
    assert first == other
    assert sharded[0].parameters != sharded[1].parameters  # each rank has rows of its own
    assert sharded[-1].losses == pytest.approx(whole[-1].losses, rel=1e-5)
    for name, expected in whole[0].probe.items():
        assert sharded[0].probe[name] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
    for sharded_round, whole_round in zip(*reversed(logs), strict=True):
        assert sharded_round["worker_norms"] == pytest.approx(whole_round["worker_norms"], rel=1e-3)
        assert sharded_round["pseudo_gradient_norm"] == pytest.approx(whole_round["pseudo_gradient_norm"], rel=1e-3)


@pytest.mark.slow
def test_workers_without_sync_equal_separate_jobs_with_fsdp2_by_digest():
    options = {**FSDP2, "bf16": True}
    together = local_run("dp2", "fp32", workers=2, local_sgd_sync_interval=1000, **options)
    for worker, ranks in enumerate(worker_slices(together, "dp2", 2)):
        alone = run_pretrain(
            arguments("dp2", "fp32", workers=None, **options), 2, patch="backend-only", before=as_worker(worker, 2)
        )
        assert model_digests(ranks) == model_digests(alone)
        assert [rank.grad_norms for rank in ranks] == [rank.grad_norms for rank in alone]
        assert [rank.losses for rank in ranks] == [rank.losses for rank in alone]


def test_steps_without_a_round_cross_workers_zero_times_with_fsdp2():
    run = arguments("dp2", "fp32", workers=2, train_iters=8, local_sgd_sync_interval=4, log_interval=100, **FSDP2)
    for rank in run_pretrain(run, 4, before=install_meter, probe=crossing_calls):
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [3, 7], rank.probe


# Iteration 1 lies in warm-up, 4 in the middle of an interval, 5 at a sync point with outer momentum. What is evaluated
# after every step is the anchor, in parameters that FSDP2 keeps whole after a forward pass.
RESUMED: Options = {
    "train_iters": 8,
    "local_sgd_warmup_steps": 2,
    "local_sgd_sync_interval": 3,
    "eval_iters": 1,
    "eval_interval": 1,
    "torch_fsdp2_no_reshard_after_forward": True,
}


@pytest.mark.parametrize(
    ("points", "extra"),
    [
        pytest.param((1, 4, 5), {**GATED, "bf16": True}, id="bf16-swiglu", marks=pytest.mark.slow),
        pytest.param((4, 5), {**FSDP2, **GUARDED}, id="fp32-penalty"),
        pytest.param(
            (4,), {**FSDP2, "optimizer": "sgd", "local_sgd_codec": "int4"}, id="sgd-codec", marks=pytest.mark.slow
        ),
    ],
)
def test_a_resume_with_fsdp2_follows_the_uninterrupted_run_bit_for_bit(tmp_path, points, extra):
    options = {**RESUMED, **extra}
    whole = local_run("dp2", "fp32", workers=2, save=str(tmp_path), save_interval=1, **options)
    for iteration in points:
        resumed = local_run("dp2", "fp32", workers=2, load=str(tmp_path), ckpt_step=iteration, **options)
        assert same_state(resumed, whole), f"resumed at {iteration}"
        assert [rank.losses for rank in resumed] == [rank.losses[iteration:] for rank in whole]


def test_fragments_meet_also_where_ranks_cannot_divide_the_rows():
    odd = {"vocab_size": 130, "hidden_size": 36, "ffn_hidden_size": 75}
    fragments = {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1, "local_sgd_sync_interval": 2}
    ranks = local_run("dp2", "fp32", workers=2, train_iters=4, **FSDP2, **odd, **fragments)
    first, other = (model_digests(part) for part in worker_slices(ranks, "dp2", 2))
    assert first == other


SOLO: Options = {"outer_optimizer_lr": 0.7}
UNEVEN = {
    "vocabulary": (
        {"vocab_size": 129},
        "the 2 ranks of a model's shards divide evenly; embedding.word_embeddings.weight has 129, "
        "output_layer.weight has 129: give --make-vocab-size-divisible-by a multiple of 2, or drop --save",
    ),
    "halves": (
        {"swiglu": True, "disable_bias_linear": True, "ffn_hidden_size": 70, "local_sgd_workers": 1, **SOLO},
        "(of both halves of gated MLPs); decoder.layers.0.mlp.linear_fc1.weight has 140, "
        "decoder.layers.1.mlp.linear_fc1.weight has 140: choose sizes of the model",
    ),
}


@pytest.mark.parametrize("sizes", UNEVEN)
def test_rows_that_ranks_cannot_divide_are_refused_before_the_first_step_where_they_are_to_be_saved(tmp_path, sizes):
    options, said = UNEVEN[sizes]
    run = arguments("dp2", "fp32", workers=2, save=str(tmp_path), save_interval=1, **{**FSDP2, **options})
    exits = run_failing_pretrain(run, 4)
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: --use-torch-fsdp2 with --save: ") == 1 and said in errors
    assert "Traceback" not in errors and "iteration        1/" not in exits[-1].stdout


def test_evaluating_the_anchor_in_parameters_that_fsdp2_keeps_whole_changes_no_bit():
    options = {**RESUMED, **FSDP2, "train_iters": 5}
    evaluated = local_run("dp2", "fp32", workers=2, **options)
    unseen = local_run("dp2", "fp32", workers=2, **{**options, "eval_interval": 1000})
    assert [rank.losses for rank in evaluated] == [rank.losses for rank in unseen]
