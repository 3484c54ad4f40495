# SPDX-License-Identifier: Apache-2.0
"""Expert merging: the formula, its golden values, any order of the tensors; non-finite experts stay apart."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.spes import MergeConfig, expert_layers, merge_experts, merging

NAME = "decoder.layers.{}.mlp.experts.{}.linear_fc{}.weight"
Values = dict[str, torch.Tensor]


def model(experts: int, layers: int = 1, ffn: int = 3, hidden: int = 4, seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    found = {"decoder.final_layernorm.weight": torch.randn(hidden, generator=generator)}
    for layer in range(layers):
        for expert in range(experts):
            found[NAME.format(layer, expert, 1)] = torch.randn(2 * ffn, hidden, generator=generator)
            found[NAME.format(layer, expert, 2)] = torch.randn(hidden, ffn, generator=generator)
    return found


def golden_model() -> Values:
    """Six experts of small whole numbers; w1 and v1 are the halves of fc1, w2 the transpose of fc2."""
    found = {}
    for expert in range(6):
        w1, v1, w2 = (
            torch.tensor([float((expert + 1) * (i + 1) * (j + 2) * 7 % 11 - 5) for i in range(4)]).view(2, 2)
            for j in range(3)
        )
        found[NAME.format(0, expert, 1)] = torch.cat([w1, v1])
        found[NAME.format(0, expert, 2)] = w2.T.contiguous()
    return found


def test_golden_values():
    values = golden_model()
    (layer,) = expert_layers({name: tuple(value.shape) for name, value in values.items()})
    cosines = merging.similarities(layer, lambda name, at, count: values[name].view(-1)[at : at + count])
    torch.testing.assert_close(
        cosines[0, 1:].float(), torch.tensor([0.420210, 0.067116, 0.030015, -0.354654, 0.281942]), rtol=0, atol=1e-6
    )
    merged = merge_experts(values, alpha=0.1, topk=4)
    wanted = {
        0: ([[-1.725, 0.725], [3.725, -3.725], [4.725, 3.725], [2.725, 2.0]], [[0.725, -3.725], [2.0, -2.725]]),
        3: ([[-3.6, -2.75], [-1.625, -1.05], [2.05, -1.625], [4.6, 0.925]], [[-2.75, -1.05], [0.925, 2.625]]),
    }
    for expert, (fc1, w2) in wanted.items():
        torch.testing.assert_close(merged[NAME.format(0, expert, 1)], torch.tensor(fc1))
        torch.testing.assert_close(merged[NAME.format(0, expert, 2)], torch.tensor(w2).T)


def by_formula(values: Values, experts: int, layers: int, alpha: float, topk: int) -> Values:
    """The formula as it is written, without any saving of memory."""
    found = dict(values)
    for layer in range(layers):
        fc1 = [values[NAME.format(layer, expert, 1)] for expert in range(experts)]
        gates = torch.stack([weight[: len(weight) // 2].reshape(-1) for weight in fc1])
        cosines = torch.cosine_similarity(gates[:, None], gates[None], dim=2).fill_diagonal_(-torch.inf)
        for expert in range(experts):
            donors = cosines[expert].topk(topk).indices.tolist()
            for part in (1, 2):
                own = values[NAME.format(layer, expert, part)]
                vectors = [values[NAME.format(layer, donor, part)] - own for donor in donors]
                found[NAME.format(layer, expert, part)] = own + alpha * torch.stack(vectors).mean(0)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("topk", "alpha"), [(2, 0.3), (4, 0.05)])
def test_it_is_the_formula_in_every_layer(monkeypatch: pytest.MonkeyPatch, seed: int, topk: int, alpha: float):
    # Blocks of 5 elements: tensors and gates end within one.
    monkeypatch.setattr(merging, "_BLOCK_BYTES", 4 * 8 * 5)
    values = model(8, layers=2, seed=seed)
    merged, wanted = merge_experts(values, alpha=alpha, topk=topk), by_formula(values, 8, 2, alpha, topk)
    assert list(merged) == list(values)
    for name in values:
        torch.testing.assert_close(merged[name], wanted[name], rtol=0, atol=1e-6)
    assert merged["decoder.final_layernorm.weight"] is values["decoder.final_layernorm.weight"]


@settings(max_examples=20)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_the_order_of_the_tensors_changes_no_bit(experts: int, order: random.Random):
    values = model(experts, layers=2)
    names = list(values)
    order.shuffle(names)
    merged, again = merge_experts(values, alpha=0.2), merge_experts({name: values[name] for name in names}, alpha=0.2)
    assert list(again) == names and all(torch.equal(merged[name], again[name]) for name in values)


def test_the_numbering_of_the_experts_changes_nothing_but_their_names():
    values = model(6)
    other = {
        name.replace(f"experts.{e}.", f"experts.{5 - e}."): value
        for name, value in values.items()
        for e in range(6)
        if f"experts.{e}." in name
    }
    merged, again = merge_experts(values, alpha=0.2), merge_experts(other, alpha=0.2)
    for expert in range(6):
        torch.testing.assert_close(merged[NAME.format(0, expert, 1)], again[NAME.format(0, 5 - expert, 1)])


def test_with_few_experts_all_others_are_models_or_the_expert_itself_too_as_in_the_official_code():
    values = model(4)
    weights = torch.stack([values[NAME.format(0, expert, 1)] for expert in range(4)])
    others = weights.sum(0) - weights
    for merged, wanted in (
        (merge_experts(values, alpha=0.1, topk=4), 0.9 * weights + 0.1 / 3 * others),
        (merge_experts(values, alpha=0.1, topk=9), 0.9 * weights + 0.1 / 3 * others),
        (merge_experts(values, alpha=0.1, topk=4, like_official=True), (1 - 0.1 * 3 / 4) * weights + 0.1 / 4 * others),
    ):
        torch.testing.assert_close(torch.stack([merged[NAME.format(0, expert, 1)] for expert in range(4)]), wanted)
    alone = model(1)
    assert all(torch.equal(value, alone[name]) for name, value in merge_experts(alone, alpha=0.1).items())


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_expert_is_never_anothers_model_and_stays_as_it_is(part: int, content: float):
    values = model(6)
    values[NAME.format(0, 2, part)].view(-1)[-1] = content
    merged = merge_experts(values, alpha=0.1)
    for expert in range(6):
        for each in (1, 2):
            name = NAME.format(0, expert, each)
            if expert == 2:
                assert merged[name] is values[name]
            else:
                assert merged[name].isfinite().all() and not torch.equal(merged[name], values[name])


def test_a_gate_of_zeros_is_not_a_problem():
    values = model(6)
    values[NAME.format(0, 1, 1)].zero_()
    merged = merge_experts(values, alpha=0.1)
    assert all(value.isfinite().all() for value in merged.values())
    # It resembles all others equally, and takes over from the first ones.
    others = [values[NAME.format(0, expert, 1)] for expert in (0, 2, 3, 4)]
    torch.testing.assert_close(merged[NAME.format(0, 1, 1)], 0.1 * torch.stack(others).mean(0))


def test_half_precision_is_merged_in_fp32_and_stays_half_precision():
    values = {name: value.bfloat16() for name, value in model(6).items()}
    wanted = merge_experts({name: value.float() for name, value in values.items()}, alpha=0.1)
    for name, value in merge_experts(values, alpha=0.1).items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, wanted[name].bfloat16())


@pytest.mark.parametrize(
    ("config", "by_step"),
    [
        ({"alpha_start": 0.05, "decay_steps": 2000, "interval": 200}, {200: 0.045, 1800: 0.005, 2000: 0, 2200: 0}),
        ({"alpha_start": 0.01, "decay_steps": 10000, "interval": 500}, {500: 0.0095, 0: 0, 501: 0, 499: 0}),
        ({"alpha_start": 0.05, "decay_steps": 20000, "interval": 500}, {500: 0.04875}),
        ({"alpha_start": 0.1, "decay_steps": 4000, "interval": 200}, {200: 0.095, 100: 0}),
    ],
)
def test_alpha_decays_in_a_straight_line_and_acts_at_multiples_of_the_interval(config, by_step: dict[int, float]):
    schedule = MergeConfig(**config)
    assert {step: schedule.alpha(step) for step in by_step} == pytest.approx(by_step, abs=1e-12)


@pytest.mark.parametrize(
    ("alpha_start", "decay_steps", "interval", "count"),
    [(0.05, 2000, 200, 9), (0.01, 10000, 500, 19), (0.05, 20000, 500, 39), (0.1, 4000, 200, 19)],
)
def test_the_number_of_merges_is_that_of_the_official_settings(
    alpha_start: float, decay_steps: int, interval: int, count: int
):
    schedule = MergeConfig(interval=interval, alpha_start=alpha_start, decay_steps=decay_steps)
    assert sum(schedule.alpha(step) > 0 for step in range(0, 50_000, 100)) == count
    # Rounds every 300 steps meet the merges only at common multiples.
    merging_rounds = [step for step in range(0, 50_000, 300) if schedule.alpha(step) > 0]
    assert all(step % interval == 0 for step in merging_rounds) and len(merging_rounds) < count


def test_bad_values_are_named_as_the_server_calls_them():
    problems = MergeConfig(interval=0, alpha_start=1.5, decay_steps=0, topk=0).problems()
    assert [text.split(" is ")[0] for text in problems] == [
        "merge_interval",
        "merge_alpha_start",
        "merge_decay_steps",
        "merge_topk",
    ]
    assert MergeConfig(interval=500).problems() == []
