# SPDX-License-Identifier: Apache-2.0
"""Weights of the experts' token counts in Megatron's load-balancing losses."""

import pytest

from tests.support.distributed import run_ranks

EXPERTS, TOKENS, TOPK = 4, 6, 2


def losses() -> dict[str, float]:
    import torch
    from megatron.core.transformer.moe import router

    from megatron_ext.activation import registry
    from megatron_ext.hooks import Feature, WeighsExperts, hooks
    from megatron_ext.seams.router import patches
    from megatron_ext.spes.load_balance import count_weights, load_balancing_loss

    class Half(Feature, WeighsExperts):
        def expert_weights(self, experts):
            return count_weights(experts, (0, 3), 0.5)

    generator = torch.Generator().manual_seed(0)
    # Two sequences; the loss by sequence has their experts side by side.
    probabilities = [torch.rand(TOKENS, EXPERTS, generator=generator).softmax(dim=1) for _ in range(2)]
    counts = [torch.bincount(found.topk(TOPK).indices.flatten(), minlength=EXPERTS) for found in probabilities]

    def loss(sequences: int) -> float:
        return float(
            router.switch_load_balancing_loss_func(
                probs=torch.cat(probabilities[:sequences], dim=1),
                tokens_per_expert=torch.cat(counts[:sequences]),
                total_num_tokens=TOKENS,
                topk=TOPK,
                num_experts=EXPERTS,
                moe_aux_loss_coeff=0.01,
            )
        )

    found = {"stock": loss(1)}
    registry().apply(patches())
    found["patched"] = loss(1)
    hooks.activate([Half()])
    found |= {"one": loss(1), "two": loss(2)}
    for index in range(2):
        found[f"expected{index}"] = float(
            load_balancing_loss(
                [counts[index]],
                [probabilities[index]],
                topk=TOPK,
                weight=0.01,
                count_weights=count_weights(EXPERTS, (0, 3), 0.5),
            )
        )
    return found


def test_weighted_counts_give_the_loss_of_the_formula_and_no_weights_change_nothing():
    (found,) = run_ranks(losses, 1)
    assert found["patched"] == found["stock"] != found["one"]
    assert found["one"] == pytest.approx(found["expected0"], rel=1e-6)
    assert found["two"] == pytest.approx(found["expected0"] + found["expected1"], rel=1e-6)
