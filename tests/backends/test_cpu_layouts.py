# SPDX-License-Identifier: Apache-2.0
"""Stock Megatron on CPU + gloo: every parallel layout computes what one rank computes.

One rank trains and saves after its first step; every layout loads that checkpoint, weights and optimizer.
"""

import os

import pytest

from tests.backends.runs import DROPOUT, losses, stock
from tests.support.every_run import one_of_each
from tests.support.presets import LATENT, LAYOUTS, MOE, PRECISIONS, Options, toy_gpt

DENSE: Options = {
    "num_layers": 4,
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
}
EXPERTS: Options = {
    **DENSE,
    **MOE,
    "num_layers": 2,
    "moe_aux_loss_coeff": 0.0,
    "disable_bias_linear": True,
    "no_load_optim": True,
    "lr_decay_iters": 4,
}
OVERLAP: Options = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder of a checkpoint at iteration 1, losses and gradient norms of one rank after it)."""
    folder = os.fspath(tmp_path_factory.mktemp("dense"))
    alone = stock(toy_gpt(DENSE, save=folder, save_interval=1), 1)
    return folder, losses(alone)[1:], alone[0].grad_norms[1:]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The same for a mixture of experts, whose optimizer starts fresh: Megatron cannot reshard it over EP."""
    folder = os.fspath(tmp_path_factory.mktemp("experts"))
    stock(toy_gpt(EXPERTS, train_iters=1, save=folder, save_interval=1), 1)
    alone = stock(toy_gpt(EXPERTS, load=folder), 1)
    return folder, losses(alone), alone[0].grad_norms


def assert_same(options, layout, world_size, start):
    folder, expected, norms = start
    ranks = stock(toy_gpt(options, layout, load=folder, ckpt_step=1), world_size)
    assert len(losses(ranks)) == len(expected) == 3
    assert losses(ranks) == pytest.approx(expected, rel=1e-5)
    assert ranks[0].grad_norms == pytest.approx(norms, rel=1e-4)
    if "tensor_model_parallel_size" in layout:
        assert norm_weights(ranks[0]) == norm_weights(ranks[1]) != {}


def norm_weights(rank):
    """Digests of the parameters that both tensor-parallel ranks hold whole."""
    return {name: digest for name, digest in rank.parameters[0].items() if "layernorm" in name}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, OVERLAP, id="dp2-overlap"),
        pytest.param(2, LAYOUTS["tp2"].options, id="tp2"),
        pytest.param(2, LAYOUTS["tp2-sp"].options, id="tp2-sp"),
        pytest.param(2, LAYOUTS["pp2-vpp2"].options, id="pp2-vpp2"),
        pytest.param(4, {**LAYOUTS["tp2-pp2"].options, "sequence_parallel": True}, id="tp2-sp-pp2"),
    ],
)
def test_a_dense_layout_computes_what_one_rank_computes(world_size, layout, dense):
    assert_same(DENSE, layout, world_size, dense)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """The same with multi-latent attention."""
    folder = os.fspath(tmp_path_factory.mktemp("latent"))
    alone = stock(toy_gpt(DENSE, LATENT, save=folder, save_interval=1), 1)
    return folder, losses(alone)[1:], alone[0].grad_norms[1:]


@pytest.mark.parametrize("layout", one_of_each(["tp2-sp", "tp2-pp2"], {0}))
def test_latent_attention_is_cut_as_one_rank_computes_it(layout, latent):
    chosen = LAYOUTS[layout]
    assert_same({**DENSE, **LATENT}, chosen.options, chosen.world_size(), latent)


def test_the_order_of_ranks_does_not_matter(dense):
    assert_same(DENSE, {**LAYOUTS["pp2"].options, "use_tp_pp_dp_mapping": True}, 4, dense)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_expert_parallelism_computes_what_one_rank_computes(dispatcher, experts):
    layout = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher, **OVERLAP}
    assert_same(EXPERTS, layout, 2, experts)


def test_recompute_changes_no_bit_and_replicated_weights_stay_equal_under_dropout():
    layout = {**LAYOUTS["tp2"].options, **PRECISIONS["bf16"], **DROPOUT}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    selective = {"recompute_granularity": "selective"}
    kept, *recomputed = [stock(toy_gpt(layout, extra), 2) for extra in ({}, full, selective)]
    for ranks in recomputed:
        assert [rank.losses for rank in ranks] == [rank.losses for rank in kept]
        assert [rank.parameters for rank in ranks] == [rank.parameters for rank in kept]
    # Where activations are replicated, dropout must draw the same mask on both ranks.
    assert norm_weights(kept[0]) == norm_weights(kept[1]) != {}
