# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous models, whose layers lack attention or an MLP or have them linear or narrower, take part in rounds."""

import pytest

from tests.local_sgd.runs import GUARD, arguments, model_digests, same_state, worker_slices
from tests.options.test_parser import newest
from tests.support.every_run import one_of_each
from tests.support.heterogeneous import heterogeneous
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine

KINDS = {
    "penalty": ("tp2", "bf16-distopt", GUARD),
    "stages and a codec": ("pp2", "bf16-distopt-overlap", {"local_sgd_codec": "int8"}),
    "sequence parallelism, predicting too": ("tp2-sp", "bf16", {"mtp_num_layers": 1}),
    "fragments": ("single", "fp32", {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1}),
    "in forward": ("single", "bf16", {"local_sgd_sync_in_forward": True}),
}


@newest
@pytest.mark.parametrize("kind", one_of_each(list(KINDS), {0}))
def test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit(tmp_path, kind):
    layout, precision, extra = KINDS[kind]
    assert_equal_and_resumed(tmp_path, layout, precision, extra)


@newest
@pytest.mark.usefixtures("double_of_transformer_engine")
def test_so_they_are_with_norms_inside_transformer_engine_s_layers(tmp_path):
    whole = assert_equal_and_resumed(
        tmp_path, "tp2", "bf16-distopt", {"transformer_impl": "transformer_engine"}, before=accept_transformer_engine
    )
    assert "layers.2.mlp.layer_norm_weight" in "\n".join(whole[0].parameters[0])


def assert_equal_and_resumed(tmp_path, layout, precision, extra, **how):
    described = heterogeneous(tmp_path, has_linear_layers=layout != "tp2-sp")
    options = {**described, "local_sgd_sync_interval": 3, **extra}
    ranks = LAYOUTS[layout].world_size(2)
    saving = {"save": str(tmp_path), "save_interval": 4}
    whole = run_pretrain(arguments(layout, precision, workers=2, **saving, **options), ranks, **how)
    first, second = (model_digests(part) for part in worker_slices(whole, layout, 2))
    assert first == second
    loading = {"load": str(tmp_path), "ckpt_step": 4}
    resumed = run_pretrain(arguments(layout, precision, workers=2, **loading, **options), ranks, **how)
    assert same_state(resumed, whole)
    return whole
