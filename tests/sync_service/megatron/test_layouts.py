# SPDX-License-Identifier: Apache-2.0
"""However the peers of a run are cut, they compute what peers of one rank compute."""

import pytest

from tests.support.every_run import one_of_each
from tests.support.presets import MOE, Options
from tests.sync_service.jobs import Kind
from tests.sync_service.megatron.mixed_layouts import ALONE, MakeService, assert_layouts_agree

CUT: list[Kind] = [
    ALONE,
    ("tp2-sp", "fp32", 2),
    ("pp2", "fp32", 2),
    ("moe-ep2", "fp32", 2),
    ("dp2", "fp32-distopt", 2),
    ("dp2", "fp32-fsdp2", 2),
]
MODEL = {
    **MOE,
    "moe_aux_loss_coeff": 0.0,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


MTP: Options = {"mtp_num_layers": 1, "position_embedding_type": "rope", "no_rope_fusion": True}


@pytest.mark.parametrize(
    ("kinds", "extra"),
    one_of_each([(CUT, {}), ([CUT[i] for i in (0, 2, 3)], MTP)], {0}),
    ids=["", "multi-token prediction"],
)
def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(
    make_service: MakeService, kinds: list[Kind], extra: Options
):
    values = assert_layouts_agree(make_service, kinds, {**MODEL, **extra})
    assert any(name.startswith("mtp.") for name in values) == bool(extra)
