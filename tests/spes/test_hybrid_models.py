# SPDX-License-Identifier: Apache-2.0
"""Experts of a hybrid model are owned as a GPT's are; on doubles of Transformer Engine and mamba_ssm."""

import pytest

from tests.spes.owning_peers import trained_by_owners
from tests.spes.test_feature import expert_of, watch_steps
from tests.support.presets import GROUPED, HYBRID
from tests.support.transformer_engine import NEEDS_HYBRID_MODELS, accept_transformer_engine
from tests.sync_service.service import Zygote

pytestmark = [pytest.mark.usefixtures("double_of_transformer_engine"), NEEDS_HYBRID_MODELS]


def test_a_peer_trains_its_own_experts_and_all_other_layers(zygote: Zygote, tmp_path):
    options = {**HYBRID, **GROUPED, "hybrid_layer_pattern": "ME*M"}
    options["before"] = (accept_transformer_engine, watch_steps)
    seen = list(trained_by_owners(zygote, tmp_path, **options))
    assert len(seen) == 32  # what changed and what has a gradient, in eight steps of two peers
    for owned, tensors in seen:
        assert {expert_of(tensor) for tensor in tensors} == {None, *owned}
        for layer in (0, 3):
            assert {name for name in tensors if name.startswith(f"decoder.layers.{layer}.mixer.")}
