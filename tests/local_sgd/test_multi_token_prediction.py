# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction take part in rounds, and so does the copy of the embedding that they need."""

import pytest

from tests.local_sgd.runs import GUARD, arguments, local_run, model_digests, same_state, worker_slices
from tests.support.every_run import one_of_each
from tests.support.presets import Options
from tests.support.pretrain import run_pretrain

MTP: Options = {
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
    "untie_embeddings_and_output_weights": True,
    "local_sgd_sync_interval": 3,
}
KINDS = {
    "penalty": ("tp2", "bf16-distopt", GUARD),
    "stages and a codec": ("pp2", "bf16-distopt-overlap", {"local_sgd_codec": "int8"}),
    "fragments": ("pp2", "bf16", {"local_sgd_fragments": 2, "local_sgd_fragment_sync_delay": 1}),
    "experts": ("moe-ep2", "bf16-distopt", {}),
    "a stage of its own": ("pp3-prediction", "bf16-distopt", GUARD),
}


@pytest.mark.parametrize("kind", one_of_each(list(KINDS), {0, 3, 4}))
def test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit(tmp_path, kind):
    layout, precision, extra = KINDS[kind]
    options = {**MTP, **extra}
    whole = local_run(layout, precision, workers=2, save=str(tmp_path), save_interval=4, **options)
    first, second = (model_digests(part) for part in worker_slices(whole, layout, 2))
    assert first == second
    assert any("mtp.layers.0.eh_proj" in name for rank in whole for name in rank.parameters[0])
    resumed = local_run(layout, precision, workers=2, load=str(tmp_path), ckpt_step=4, **options)
    assert same_state(resumed, whole)


def prediction_layer(model, optimizer, args):
    """Probe: the values of the prediction layer's projection and of the embedding, in fp32."""
    return {
        name.removeprefix("module."): parameter.detach().float().tolist()
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if "eh_proj" in name or "word_embeddings" in name
    }


def test_a_round_of_the_mean_after_one_step_is_the_step_of_the_mean_gradient():
    options = {**MTP, "local_sgd_sync_interval": 1, "optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}
    options |= {"lr": 0.1, "clip_grad": 0.0, "train_iters": 2, "global_batch_size": 4}
    ours = arguments("pp2", "fp32", workers=2, outer_optimizer="none", **options)
    ranks = run_pretrain(ours, 4, probe=prediction_layer)
    theirs = arguments("pp2", "fp32", workers=None, **{**options, "local_sgd_sync_interval": None})
    stock = run_pretrain(theirs, 4, probe=prediction_layer)
    for rank, other in zip(ranks, stock, strict=True):
        assert rank.probe.keys() == other.probe.keys()
        for name, values in rank.probe.items():
            for row, expected in zip(values, other.probe[name], strict=True):
                assert row == pytest.approx(expected, abs=1e-6), name
    assert [len(rank.probe) for rank in ranks] == [1, 1, 2, 2]
