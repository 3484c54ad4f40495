# SPDX-License-Identifier: Apache-2.0
"""Peers that train a hybrid model (state-space layers, attention, experts), on doubles of the kernels' packages."""

import pytest

from tests.support.presets import GROUPED, HYBRID
from tests.support.transformer_engine import NEEDS_HYBRID_MODELS, accept_transformer_engine
from tests.sync_service.jobs import Kind
from tests.sync_service.megatron.mixed_layouts import ALONE, MakeService, assert_layouts_agree

pytestmark = [pytest.mark.usefixtures("double_of_transformer_engine"), NEEDS_HYBRID_MODELS]

CUT: list[Kind] = [ALONE, ("tp2-sp", "fp32", 2), ("pp2", "fp32", 2)]
MODEL = {
    **HYBRID,
    **GROUPED,
    "hybrid_layer_pattern": "ME*M",
    "moe_aux_loss_coeff": 0.0,
    "untie_embeddings_and_output_weights": True,
    # Of an expert that has few tokens Adam would make whole steps of what rounding leaves.
    "adam_eps": 1e-4,
}


def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(make_service: MakeService):
    values = assert_layouts_agree(make_service, CUT, MODEL, before=accept_transformer_engine)
    assert values["decoder.layers.0.mixer.in_proj.weight"].shape == (166, 32)
    assert "decoder.layers.1.mlp.experts.3.linear_fc2.weight" in values
