# SPDX-License-Identifier: Apache-2.0
"""Who owns which experts: every expert has owners, whatever the way of sharing them out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.spes import Ownership, expert_layers, expert_of

EXPERT = "decoder.layers.{}.mlp.experts.{}.linear_fc1.weight"


@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_shares_cover_all_experts_once_and_everybody_has_what_was_asked_for(each: int, shares: list[int], even: bool):
    shares = [each] * len(shares) if even else shares
    for build in (Ownership.contiguous, Ownership.interleaved):
        found = build(len(shares), sum(shares), None if even else shares)
        assert [len(found.owned_by(peer)) for peer in range(len(shares))] == shares
        assert sorted(expert for peer in range(len(shares)) for expert in found.owned_by(peer)) == [*range(sum(shares))]


def test_blocks_are_the_papers_and_interleaved_ones_are_dealt_out():
    blocks = Ownership.contiguous(4, 16)
    assert blocks.owned_by(1) == (4, 5, 6, 7) and all(blocks.owners[e] == (e // 4,) for e in range(16))
    assert Ownership.contiguous(3, 6, (1, 2, 3)).owned_by(2) == (3, 4, 5)
    assert Ownership.interleaved(4, 8).owned_by(1) == (1, 5)
    # Peer 0 has its share after the first turn.
    assert Ownership.interleaved(3, 6, (1, 2, 3)).owners == ((0,), (1,), (2,), (1,), (2,), (2,))


def test_experts_with_several_owners_and_shared_tensors_are_told_apart():
    found = Ownership.of_map(3, 4, [[0], [1, 0], [2], [2, 1, 0]])
    assert found.owned_by(0) == (0, 1, 3)
    assert found.owners_of(EXPERT.format(5, 1)) == (0, 1)
    # What everybody trains is what the service calls shared, so that an outer optimizer steps it as well.
    assert found.owners_of(EXPERT.format(5, 3)) == ()
    shared = (
        "mlp.router.weight",
        "mlp.router.expert_bias",
        "mlp.shared_experts.linear_fc1.weight",
        "input_layernorm.bias",
    )
    for name in ("embedding.word_embeddings.weight", *(f"decoder.layers.0.{leaf}" for leaf in shared)):
        assert found.owners_of(name) == () and all(found.is_trained(name, peer) for peer in range(3))
    assert [found.is_trained(EXPERT.format(0, 2), peer) for peer in range(3)] == [False, False, True]
    everyone = Ownership.everyone(3, 4)
    assert everyone.owned_by(2) == (0, 1, 2, 3) and everyone.owners_of(EXPERT.format(0, 0)) == ()


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (
            lambda: Ownership.contiguous(3, 16),
            "16 experts cannot be shared out evenly to 3 peers; say in experts_per_peer",
        ),
        (lambda: Ownership.contiguous(2, 4, [1, 2]), "experts_per_peer is 1, 2, which makes 3; .* up to the 4 experts"),
        (lambda: Ownership.interleaved(2, 4, [4, 0]), "experts_per_peer is 4, 0, .* numbers of 1 or more"),
        (lambda: Ownership.contiguous(2, 4, [4]), "experts_per_peer has 1 numbers; give one for each of the 2 peers"),
        (lambda: Ownership.of_map(2, 3, [[0], [1]]), "expert_owners: expert 2 is missing; name the experts 0 to 2"),
        (lambda: Ownership.of_map(2, 2, {0: [0], 7: [1]}), "expert 1 is missing, and there is no expert 7"),
        (lambda: Ownership.of_map(2, 2, [[0], [2]]), r"expert 1 has the owner 2; there are the peers 0 to 1"),
        (lambda: Ownership.of_map(2, 2, [[0], [1, 1]]), "expert 1 has the owners 1, 1; name each once"),
        (lambda: Ownership.of_map(2, 2, [[0, 1], []]), "expert 1 has no owner; give it one"),
        (lambda: Ownership.of_map(3, 2, [[0], [2]]), "peer 1 owns no expert; give every peer at least one"),
        (
            lambda: Ownership.contiguous(2, 4).owners_of(EXPERT.format(0, 4)),
            "expert 4; ownership knows the experts 0 to 3",
        ),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_field_and_the_fix(build, problem: str):
    with pytest.raises(UserError, match=problem):
        build()


def shapes(experts: int = 3, *, gated: bool = True) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (10, 4)}
    for layer in (1, 3):
        prefix = f"decoder.layers.{layer}.mlp"
        found[f"{prefix}.router.weight"] = (experts, 4)
        found[f"{prefix}.shared_experts.linear_fc1.weight"] = (12, 4)
        for expert in reversed(range(experts)):
            found[f"{prefix}.experts.{expert}.linear_fc2.weight"] = (4, 6)
            found[f"{prefix}.experts.{expert}.linear_fc1.weight"] = (12 if gated else 6, 4)
    return found


def test_experts_are_found_by_their_global_names():
    assert expert_of(EXPERT.format(7, 12)) == 12
    assert expert_of("decoder.layers.7.mlp.shared_experts.linear_fc1.weight") is None
    layers = expert_layers(shapes())
    assert [layer.name for layer in layers] == ["decoder.layers.1.mlp", "decoder.layers.3.mlp"]
    assert layers[0].first == tuple(EXPERT.format(1, expert) for expert in range(3)) and layers[0].experts == 3
    assert layers[0].sizes == {"linear_fc1.weight": 48, "linear_fc2.weight": 24}
    # Compared by the gate, which is the first half of fc1; by all of it where there is no gate.
    assert layers[0].compared == 24 and expert_layers(shapes(gated=False))[0].compared == 24
    assert expert_layers({"layer.0.weight": (3, 4)}) == []


def test_experts_that_differ_are_refused_by_name():
    found = shapes()
    del found[EXPERT.format(1, 1)]
    with pytest.raises(UserError, match=r"tensor decoder.layers.1.mlp.experts.1.linear_fc1.weight is missing"):
        expert_layers(found)
    with pytest.raises(UserError, match=r"experts.2.linear_fc1.weight has the shape \(10, 4\)"):
        expert_layers({**shapes(), EXPERT.format(3, 2): (10, 4)})
