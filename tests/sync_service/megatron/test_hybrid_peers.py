# SPDX-License-Identifier: Apache-2.0
"""Peers that train a hybrid model (state-space layers, attention, experts), on doubles of the kernels' packages."""

import pytest

from tests.support.every_run import one_of_each
from tests.support.presets import DELTA_NET_SIZES, GROUPED, HYBRID, SPARSE_SIZES
from tests.support.transformer_engine import NEEDS_HYBRID_MODELS, accept_transformer_engine
from tests.sync_service.jobs import Kind
from tests.sync_service.megatron.mixed_layouts import ALONE, MakeService, assert_layouts_agree

pytestmark = [pytest.mark.usefixtures("double_of_transformer_engine"), NEEDS_HYBRID_MODELS]

CUT: list[Kind] = [ALONE, ("tp2-sp", "fp32", 2)]
COMMON = {
    "untie_embeddings_and_output_weights": True,
    # Of an expert that has few tokens Adam would make whole steps of what rounding leaves.
    "adam_eps": 1e-4,
}
EXPERTS = {**GROUPED, "moe_aux_loss_coeff": 0.0}
MODELS: dict[str, tuple[list[Kind], dict, dict[str, tuple[int, ...]]]] = {
    "state-space layers and experts": (
        [*CUT, ("pp2", "fp32", 2)],
        {**EXPERTS, "hybrid_layer_pattern": "ME*M"},
        {
            "decoder.layers.0.mixer.in_proj.weight": (166, 32),
            "decoder.layers.1.mlp.experts.3.linear_fc2.weight": (32, 128),
        },
    ),
    "Gated DeltaNet, predicting too": (
        CUT,
        {**DELTA_NET_SIZES, "swiglu": True, "hybrid_layer_pattern": "GM*-/G-", "mtp_num_layers": 1},
        {
            "decoder.layers.0.self_attention.in_proj.weight": (72, 32),
            "mtp.layers.0.mtp_model_layer.layers.0.self_attention.out_proj.weight": (32, 16),
        },
    ),
    "sparse attention": (
        CUT,
        {**SPARSE_SIZES, "no_dsa_indexer_rotate_activation": True, "hybrid_layer_pattern": "MD-+"},
        {"decoder.layers.1.self_attention.core_attention.indexer.linear_wk.weight": (8, 32)},
    ),
}


# The layers of the others are those of GPTs in test_current_layers.py, and of workers' hybrid models.
@pytest.mark.parametrize("model", one_of_each(list(MODELS), {0}))
def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(make_service: MakeService, model: str):
    kinds, options, expected = MODELS[model]
    options = {**HYBRID, **COMMON, **options}
    values = assert_layouts_agree(make_service, kinds, options, before=accept_transformer_engine)
    assert {name: tuple(values[name].shape) for name in expected} == expected
