# SPDX-License-Identifier: Apache-2.0
"""Layers of current models that Megatron builds on Transformer Engine alone take part in rounds.

They run on doubles of Transformer Engine, flash-linear-attention and fast_hadamard_transform, whose kernels need a GPU.
"""

from functools import partial

import pytest

from tests.local_sgd.runs import GUARD, arguments, model_digests, same_state, worker_slices
from tests.support.presets import DELTA_NET, LATENT_EXPERTS, LAYOUTS, SPARSE
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

KINDS = {
    "Gated DeltaNet": ("tp2-sp", "bf16-distopt", {**DELTA_NET, **GUARD}, "self_attention.in_proj.weight"),
    "Gated DeltaNet over stages": (
        "pp2",
        "fp32",
        {**DELTA_NET, "num_layers": 4, "local_sgd_codec": "int8"},
        "self_attention.conv1d.weight",
    ),
    "sparse attention": ("tp2-sp", "bf16-distopt", {**SPARSE, **GUARD}, "core_attention.indexer.linear_wk.weight"),
    "latent experts": ("moe-ep2", "bf16-distopt", LATENT_EXPERTS, "mlp.fc1_latent_proj.weight"),
}
train = partial(run_pretrain, before=accept_transformer_engine)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit(tmp_path, kind):
    layout, precision, extra, name = KINDS[kind]
    options = {"local_sgd_sync_interval": 3, **extra}
    ranks = LAYOUTS[layout].world_size(2)
    saving = {"save": str(tmp_path), "save_interval": 4}
    whole = train(arguments(layout, precision, workers=2, **saving, **options), ranks)
    first, second = (model_digests(part) for part in worker_slices(whole, layout, 2))
    assert first == second
    assert any(name in found for rank in whole for found in rank.parameters[0])
    loading = {"load": str(tmp_path), "ckpt_step": 4}
    resumed = train(arguments(layout, precision, workers=2, **loading, **options), ranks)
    assert same_state(resumed, whole)
