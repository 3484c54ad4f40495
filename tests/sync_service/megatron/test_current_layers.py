# SPDX-License-Identifier: Apache-2.0
"""Peers that train layers of current models, cut in different ways, on doubles of the kernels' packages."""

import pytest

from tests.support.presets import DELTA_NET, LATENT_EXPERTS, SPARSE
from tests.support.transformer_engine import accept_transformer_engine
from tests.sync_service.jobs import Kind
from tests.sync_service.megatron.mixed_layouts import ALONE, MakeService, assert_layouts_agree

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

# Of what has small gradients Adam would make whole steps of what rounding leaves.
COMMON = {"untie_embeddings_and_output_weights": True, "adam_eps": 1e-4}
MODELS: dict[str, tuple[list[Kind], dict, str]] = {
    "Gated DeltaNet": ([ALONE, ("tp2-sp", "fp32", 2)], DELTA_NET, "decoder.layers.0.self_attention.in_proj.weight"),
    "sparse attention": (
        [ALONE, ("tp2-sp", "fp32", 2)],
        {**SPARSE, "no_dsa_indexer_rotate_activation": True},
        "decoder.layers.1.self_attention.core_attention.indexer.linear_wk.weight",
    ),
    "latent experts": (
        [ALONE, ("moe-ep2", "fp32", 2)],
        {**LATENT_EXPERTS, "moe_aux_loss_coeff": 0.0},
        "decoder.layers.1.mlp.fc2_latent_proj.weight",
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(make_service: MakeService, model: str):
    kinds, options, name = MODELS[model]
    values = assert_layouts_agree(make_service, kinds, {**options, **COMMON}, before=accept_transformer_engine)
    assert name in values
