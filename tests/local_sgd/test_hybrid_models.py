# SPDX-License-Identifier: Apache-2.0
"""Hybrid models, whose layers are state-space (Mamba) layers, attention, MLPs or experts, take part in rounds.

They run on doubles of Transformer Engine and mamba_ssm, whose kernels need a GPU.
"""

from functools import partial

import pytest

from tests.local_sgd.runs import GUARD, arguments, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import DELTA_NET_SIZES, GROUPED, HYBRID, LAYOUTS, SPARSE_SIZES
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import NEEDS_HYBRID_MODELS, accept_transformer_engine

pytestmark = [pytest.mark.usefixtures("double_of_transformer_engine"), NEEDS_HYBRID_MODELS]

KINDS = {
    "penalty": ("tp2-sp", "bf16-distopt", GUARD),
    "stages, parts of stages and a codec": (
        "pp2",
        "bf16-distopt-overlap",
        {"local_sgd_codec": "int8", "hybrid_layer_pattern": "M|*M|-|M", "global_batch_size": 8},
    ),
    "fragments": (
        "single",
        "bf16",
        {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1},
    ),
    "in forward": ("single", "fp32", {"local_sgd_sync_in_forward": True}),
    "Gated DeltaNet, and norms of heads": (
        "tp2-sp",
        "bf16-distopt",
        {**DELTA_NET_SIZES, "hybrid_layer_pattern": "MG*-", "qk_layernorm": True, "swiglu": True, **GUARD},
    ),
    "sparse attention": ("tp2-sp", "bf16-distopt", {**SPARSE_SIZES, "hybrid_layer_pattern": "MD+-"}),
    "experts": ("moe-ep2", "bf16-distopt", {**GROUPED, "hybrid_layer_pattern": "ME*M"}),
    "multi-token prediction": (
        "pp2",
        "bf16-distopt",
        {
            **GROUPED,
            "hybrid_layer_pattern": "ME|-M/*E/*E",
            "mtp_num_layers": 2,
            "untie_embeddings_and_output_weights": True,
        },
    ),
    "multi-token prediction, one layer repeated": (
        "single",
        "fp32",
        {"hybrid_layer_pattern": "M-/M*/M*", "mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    ),
}
train = partial(run_pretrain, before=accept_transformer_engine)


@pytest.mark.parametrize("kind", one_of_each(list(KINDS), {1, 4, 5}))
def test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit(tmp_path, kind):
    layout, precision, extra = KINDS[kind]
    options = {**HYBRID, "local_sgd_sync_interval": 3, **extra}
    ranks = LAYOUTS[layout].world_size(2)
    saving = {"save": str(tmp_path), "save_interval": 4}
    whole = train(arguments(layout, precision, workers=2, **saving, **options), ranks)
    first, second = (model_digests(part) for part in worker_slices(whole, layout, 2))
    assert first == second
    assert any("mixer.A_log" in name for rank in whole for name in rank.parameters[0])
    loading = {"load": str(tmp_path), "ckpt_step": 4}
    resumed = train(arguments(layout, precision, workers=2, **loading, **options), ranks)
    assert same_state(resumed, whole)


def mixer_values(model, optimizer, args):
    """Probe: the values of the state-space layers."""
    return {
        name: parameter.detach().float().flatten().tolist()
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if ".mixer." in name
    }


def test_a_round_of_the_mean_after_one_step_is_the_step_of_the_mean_gradient():
    options = {**HYBRID, "optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "clip_grad": 0.0}
    options |= {"train_iters": 2, "global_batch_size": 4}
    rounds = {"outer_optimizer": "none", "local_sgd_sync_interval": 1}
    ours = train(arguments("tp2-sp", "fp32", workers=2, **rounds, **options), 4, probe=mixer_values)
    stock = train(arguments("tp2-sp", "fp32", workers=None, **options), 4, probe=mixer_values)
    for rank, other in zip(ours, stock, strict=True):
        assert rank.probe.keys() == other.probe.keys()
        assert len(rank.probe) == 18
        for name, values in rank.probe.items():
            assert values == pytest.approx(other.probe[name], abs=1e-6), name
