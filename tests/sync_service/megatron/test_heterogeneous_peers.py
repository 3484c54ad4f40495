# SPDX-License-Identifier: Apache-2.0
"""Peers that train a heterogeneous model, whose layers lack attention or an MLP or have them linear or narrower."""

from tests.support.heterogeneous import heterogeneous
from tests.sync_service.megatron.mixed_layouts import ALONE, MakeService, assert_layouts_agree

# Of gradients that are rounding alone Adam would make whole steps.
EVEN_STEPS = {"adam_eps": 1e-4}


def test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding(make_service: MakeService, tmp_path):
    kinds = [ALONE, ("tp2", "fp32", 2), ("pp2", "fp32", 2)]
    values = assert_layouts_agree(make_service, kinds, {**heterogeneous(tmp_path), **EVEN_STEPS})
    for name, shape in (
        ("decoder.layers.0.mlp.linear_fc2.weight", (32, 256)),
        ("decoder.layers.1.mlp.linear_fc2.weight", (32, 512)),
        ("decoder.layers.2.self_attention.weight", (32, 32)),
        ("decoder.layers.2.mlp.weight", (32, 32)),
    ):
        assert tuple(values[name].shape) == shape
    assert not any(name.startswith(("decoder.layers.1.self_attention", "decoder.layers.3.mlp")) for name in values)
