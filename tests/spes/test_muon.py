# SPDX-License-Identifier: Apache-2.0
"""Muon trains the experts that a peer owns and no others; rounds bring the rest."""

from tests.spes.owning_peers import trained_by_owners
from tests.spes.test_feature import expert_of
from tests.sync_service.service import Zygote


def test_a_peer_trains_its_own_experts_and_rounds_bring_the_others(zygote: Zygote, tmp_path):
    for owned, tensors in trained_by_owners(zygote, tmp_path, optimizer="muon"):
        assert {expert_of(tensor) for tensor in tensors} == {None, *owned}
