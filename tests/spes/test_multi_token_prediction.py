# SPDX-License-Identifier: Apache-2.0
"""Experts in layers of multi-token prediction are owned as those of all other layers are."""

from tests.spes.owning_peers import trained_by_owners
from tests.spes.test_feature import expert_of
from tests.sync_service.service import Zygote

MTP = {
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
    "untie_embeddings_and_output_weights": True,
}


def test_a_peer_trains_its_own_experts_there_and_rounds_bring_the_others(zygote: Zygote, tmp_path):
    for owned, tensors in trained_by_owners(zygote, tmp_path, **MTP):
        predicting = {expert_of(tensor) for tensor in tensors if tensor.startswith("mtp.")}
        assert predicting == {None, *owned}
