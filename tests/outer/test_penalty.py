# SPDX-License-Identifier: Apache-2.0
"""The pseudo-gradient penalty on numbers alone: detector, verdicts and clipping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import UserError
from megatron_ext.local_sgd import LocalSGDConfig
from megatron_ext.outer.detector import AnomalyDetector
from megatron_ext.outer.penalty import Penalty, clip_coefficient


def norms(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def detector(**options):
    return AnomalyDetector(1, 1, **{"alpha": 0.1, "warmup": 3, "threshold": 3.0, **options})


def seen(detector, *values):
    """Return the verdict on each value when all of them are learned."""
    found = []
    for value in values:
        found.append(bool(detector.verdicts(norms([value]))))
        detector.learn(norms([value]), torch.ones(1, 1, dtype=torch.bool))
    return found


def test_the_official_recurrence_gives_the_specified_trace():
    official = detector(bias_correction=False)
    means, spreads, verdicts = [], [], []
    for value in (1.0, 2.0, 3.0, 4.0, 10.0):
        verdicts += seen(official, value)
        means.append(float(official.mean))
        spreads.append(float(official.spread))
    assert means == pytest.approx([0.1, 0.29, 0.561, 0.9049, 1.81441])
    assert spreads == pytest.approx([0.081, 0.36531, 0.923651, 1.78925, 8.310713], rel=1e-6)
    assert verdicts == [False, False, False, False, True]
    assert sorted(official.window.flatten().tolist()) == pytest.approx([2.313871, 2.537803, 2.839428], abs=1e-6)


def smallest_flagged(detector):
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if bool(detector.verdicts(norms([middle]))) else (middle, high)
    return high


def test_the_official_start_is_biased_for_a_hundred_rounds_and_ours_is_not():
    options = {"alpha": 0.02, "warmup": 120}
    official, ours = detector(bias_correction=False, **options), detector(**options)
    wiggle = [1.0 + 0.01 * (-1) ** number for number in range(120)]
    seen(official, *[1.0] * 120)
    seen(ours, *wiggle)
    # Specified figures of the official one, for a constant input of 1.
    assert float(official.mean) == pytest.approx(0.911, abs=5e-4)
    assert float(official.spread.sqrt()) == pytest.approx(0.281, abs=5e-4)
    assert smallest_flagged(official) == pytest.approx(1.755, abs=5e-4)
    early = detector(bias_correction=False, alpha=0.02, warmup=10)
    seen(early, *[1.0] * 10)
    assert float(early.mean) == pytest.approx(0.183, abs=5e-4)
    assert float(early.spread.sqrt()) == pytest.approx(0.383, abs=5e-4)
    assert smallest_flagged(early) == pytest.approx(1.331, abs=1e-3)
    assert float(ours.mean) == pytest.approx(1.0, abs=1e-3)
    assert smallest_flagged(ours) < 1.05


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20))
def test_the_corrected_mean_is_the_weighted_mean_of_what_was_seen(values):
    ours = detector()
    seen(ours, *values)
    weights = [0.1 * 0.9 ** (len(values) - 1 - number) for number in range(len(values))]
    expected = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
    assert float(ours.mean) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("experience", [0, 10])
def test_what_is_non_finite_is_always_flagged(value, experience):
    fresh = detector()
    seen(fresh, *[1.0, 1.1] * experience)
    assert bool(fresh.verdicts(norms([value])))


def test_nothing_is_learned_from_a_rejected_norm():
    ours = detector()
    seen(ours, *[1.0, 1.1, 0.9] * 5)
    before = ours.state()
    ours.learn(norms([1e6]), torch.zeros(1, 1, dtype=torch.bool))
    after = ours.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bool(ours.verdicts(norms([500.0])))


def test_a_saved_detector_resumes_equally_with_as_many_workers_and_with_more():
    generator = torch.Generator().manual_seed(0)
    first = AnomalyDetector(2, 3, alpha=0.1, warmup=4, threshold=3.0)
    everyone = torch.ones(2, 3, dtype=torch.bool)
    for _ in range(9):
        first.learn(torch.rand(2, 3, generator=generator, dtype=torch.float64), everyone)
    second = AnomalyDetector(2, 3, alpha=0.1, warmup=4, threshold=3.0)
    second.load(first.state())
    more = AnomalyDetector(5, 3, alpha=0.1, warmup=4, threshold=3.0)
    more.load(first.state())
    for size in (0.1, 0.5, 1.0, 3.0, 9.0):
        value = torch.full((2, 3), size, dtype=torch.float64)
        assert torch.equal(first.verdicts(value), second.verdicts(value))
        wide = more.verdicts(torch.full((5, 3), size, dtype=torch.float64))
        assert torch.equal(wide, first.verdicts(value)[[0, 1, 0, 1, 0]])


FALLING = [3.8, 3.7, 3.5, 3.4, 3.3, 3.1, 3.0, 2.8, 2.7, 2.5, 2.4]
"""Norms of a run whose learning rate falls."""


@pytest.mark.parametrize(("relative", "left_out"), [(False, []), (True, [2])])
def test_a_worker_that_strays_among_falling_norms_stands_out_against_the_others_only(relative, left_out):
    guard = penalty(4, skip_anomaly=True, ewma_warmup_steps=10, ewma_relative=relative)
    for number, norm in enumerate(FALLING):
        wiggle = 1 + 0.01 * (-1) ** number
        (verdict,) = guard.decide(norms([norm * wiggle], [norm], [norm / wiggle], [1.02 * norm]))
        assert verdict.accepted == (0, 1, 2, 3)
    (verdict,) = guard.decide(norms([2.1], [2.15], [3.2], [2.2]))
    assert [worker for worker in range(4) if worker not in verdict.accepted] == left_out
    if relative:
        said = guard.reason(2, 0, 3.2)
        assert "the norm of its pseudo-gradient, divided by the median of all, is 1.471," in said


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3))
def test_relative_norms_do_not_know_what_all_workers_have_in_common(factor, values):
    first, second = (AnomalyDetector(3, 1, alpha=0.1, warmup=3, threshold=3.0, relative=True) for _ in range(2))
    for number in range(5):
        for each, scale in ((first, 1.0), (second, factor**number)):
            wiggled = [value * (1 + 0.1 * ((number + place) % 2)) for place, value in enumerate(values)]
            column = norms(*[[scale * value] for value in wiggled])
            each.learn(column, ~each.verdicts(column))
    assert second.mean.flatten().tolist() == pytest.approx(first.mean.flatten().tolist())


@pytest.mark.parametrize("relative", [False, True])
def test_norms_that_differ_by_rounding_alone_are_no_anomaly(relative):
    ours = AnomalyDetector(3, 1, alpha=0.1, warmup=3, threshold=3.0, relative=relative)
    for rounding in (*[0, 2**-52] * 10, 2**-40):
        column = norms([0.5 * (1 + rounding)], [1.0], [2.0 * (1 + rounding)])
        verdicts = ours.verdicts(column)
        assert not verdicts.any()
        ours.learn(column, ~verdicts)


def test_who_brings_nothing_or_nothing_finite_is_not_a_measure_for_the_others():
    ours = AnomalyDetector(5, 1, alpha=0.1, warmup=3, threshold=3.0, relative=True)
    verdicts = ours.verdicts(norms([0.0], [2.0], [math.inf], [4.0], [math.nan]))
    assert verdicts.flatten().tolist() == [False, False, True, False, True]
    ours.learn(norms([0.0], [2.0], [math.inf], [4.0], [math.nan]), ~verdicts)
    assert ours.mean.flatten().tolist() == pytest.approx([0.0, 2 / 3, 0.0, 4 / 3, 0.0])
    nobody = norms(*[[0.0]] * 5)
    assert not ours.verdicts(nobody).any()


def test_who_is_rejected_is_not_a_measure_for_what_the_others_learn():
    ours = AnomalyDetector(4, 1, alpha=0.1, warmup=3, threshold=3.0, relative=True)
    found = norms([0.8], [1.0], [1.3], [100.0])
    ours.verdicts(found)
    ours.learn(found, torch.tensor([[True], [True], [True], [False]]))
    assert ours.mean.flatten().tolist() == pytest.approx([0.8, 1.0, 1.3, 0.0])


def test_who_is_alone_is_not_compared_and_teaches_nothing():
    ours = AnomalyDetector(3, 1, alpha=0.1, warmup=3, threshold=3.0, relative=True)
    alone = norms([5.0], [math.nan], [0.0])
    ours.learn(alone, ~ours.verdicts(alone))
    assert ours.count.flatten().tolist() == [0, 0, 0]


def test_experience_with_other_norms_is_refused():
    options = {"alpha": 0.1, "warmup": 3, "threshold": 3.0}
    plain, relative = AnomalyDetector(1, 1, **options), AnomalyDetector(1, 1, **options, relative=True)
    with pytest.raises(UserError, match="has followed norms; resume without ewma_relative"):
        relative.load(plain.state())
    with pytest.raises(UserError, match="divided by their median; resume with ewma_relative"):
        plain.load(relative.state())
    relative.load(relative.state())


def penalty(workers, units=1, **fields):
    return Penalty(
        LocalSGDConfig(use_local_sgd=True, local_sgd_workers=workers, **fields), workers=workers, units=units
    )


def test_without_options_all_workers_count_alike():
    (verdict,) = penalty(4).decide(norms([1.0], [2.0], [30.0], [4.0]))
    assert verdict.accepted == (0, 1, 2, 3)
    assert verdict.weights == (0.25,) * 4


@pytest.mark.parametrize("temperature", [None, 1.0, 2.5])
def test_norm_weights_are_the_softmax_of_the_negative_norms(temperature):
    fields = {"pseudo_gradnorm_reduce": True, "weight_softmax_temperature": temperature}
    (verdict,) = penalty(3, **fields).decide(norms([1.0], [2.0], [4.0]))
    terms = [math.exp(-norm / (temperature or 1.0)) for norm in (1.0, 2.0, 4.0)]
    assert verdict.weights == pytest.approx([term / sum(terms) for term in terms])


@given(st.floats(1e-3, 1e3))
def test_scale_free_weights_do_not_depend_on_the_size_of_a_layer(scale):
    fields = {"pseudo_gradnorm_reduce": True, "weight_scale_free": True}
    (small,) = penalty(2, **fields).decide(norms([10.0], [12.0]))
    (large,) = penalty(2, **fields).decide(norms([10.0 * scale], [12.0 * scale]))
    assert large.weights == pytest.approx(small.weights)
    # The plain softmax of the same norms makes one worker take most.
    assert small.weights[0] == pytest.approx(0.545, abs=1e-3)
    (plain,) = penalty(2, pseudo_gradnorm_reduce=True).decide(norms([10.0], [12.0]))
    assert plain.weights[0] == pytest.approx(0.88, abs=1e-3)


def test_units_are_decided_apart_and_a_rejected_worker_has_no_weight():
    strict = penalty(3, units=2, skip_anomaly=True, pseudo_gradnorm_reduce=True)
    first, second = strict.decide(norms([1.0, 1.0], [math.nan, 1.0], [1.0, math.inf]))
    assert (first.accepted, second.accepted) == ((0, 2), (0, 1))
    assert first.weights == pytest.approx((0.5, 0.5))


def test_when_all_are_anomalous_nobody_counts():
    (verdict,) = penalty(2, skip_anomaly=True).decide(norms([math.nan], [math.nan]))
    assert verdict.accepted == verdict.weights == ()


@given(st.floats(0, 1e6), st.one_of(st.none(), st.floats(1e-3, 1e3)))
def test_a_clipped_norm_never_exceeds_the_limit_and_a_small_one_is_left_alone(norm, limit):
    coefficient = clip_coefficient(norm, limit)
    if limit is None or norm + 1e-6 <= limit:
        assert coefficient == 1.0
    else:
        assert coefficient * norm <= limit


@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=4), st.lists(st.floats(0, 1e4), max_size=4))
def test_weights_among_some_are_those_without_the_others(some, others):
    config = LocalSGDConfig(
        use_local_sgd=True, local_sgd_workers=2, pseudo_gradnorm_reduce=True, weight_scale_free=True
    )

    def verdict(*found):
        (decided,) = Penalty(config, workers=len(found), units=1).decide(norms(*([one] for one in found)))
        return decided

    alone, among = verdict(*some), verdict(*some, *others).among(range(len(some)))
    total = sum(among.weights)
    assert among.accepted == alone.accepted
    assert [weight / total for weight in among.weights] == pytest.approx(alone.weights, rel=1e-6, abs=1e-12)


def rise(guard, workers, rounds, size=2.0):
    """Return the verdicts of rounds after a rise of all norms that the detector does not expect."""
    for number in range(12):
        guard.decide(torch.full((workers, 2), 1 + 0.01 * (-1) ** number, dtype=torch.float64))
    return [guard.decide(torch.full((workers, 2), size, dtype=torch.float64)) for _ in range(rounds)]


@pytest.mark.parametrize(
    ("stated", "skipped"), [({}, 3), ({"ewma_relearn_rounds": 2}, 2), ({"ewma_relearn_rounds": 0}, 6)]
)
def test_a_rise_of_all_norms_skips_units_in_the_stated_rounds_and_says_the_new_level(stated, skipped):
    found = rise(penalty(3, units=2, skip_anomaly=True, ewma_warmup_steps=5, **stated), 3, 6)
    assert [len(first.accepted) for first, _ in found] == [0] * skipped + [3] * (6 - skipped)
    levels = {number: [verdict.new_levels for verdict in verdicts] for number, verdicts in enumerate(found)}
    level = {worker: (pytest.approx(1.0, abs=0.01), pytest.approx(2.0)) for worker in range(3)}
    assert levels == {number: [level if number == skipped - 1 and skipped < 6 else {}] * 2 for number in range(6)}
    # What was decided is told in the words of what it was decided by.
    assert all("above its mean of 0.99" in verdicts[0].reasons[0] for verdicts in found[:skipped])


def test_who_has_made_no_step_neither_shares_a_level_nor_keeps_it_from_being_learned():
    guard = penalty(3, skip_anomaly=True, ewma_warmup_steps=5)
    for number in range(12):
        guard.decide(torch.full((3, 1), 1 + 0.01 * (-1) ** number, dtype=torch.float64))
    found = [guard.decide(norms([2.0], [2.0], [0.0]), [4, 4, 0])[0].accepted for _ in range(5)]
    assert found == [()] * 3 + [(0, 1)] * 2


@pytest.mark.parametrize("away", [None, 1])
def test_a_saved_penalty_resumes_equally_and_one_of_an_earlier_release_restarts_counting(away):
    options = {"skip_anomaly": True, "ewma_warmup_steps": 5}
    straight, parts, state = penalty(3, units=2, **options), [], {}
    column = torch.ones(3, 2, dtype=torch.float64)
    series = [column * (1 + 0.01 * (-1) ** number) for number in range(12)] + [column * 2.0] * 2
    series += [column * torch.tensor([[3.0], [1.0], [1.0]])] * 12 + [column * 2.0] * 4
    for number, each in enumerate(series):
        steps = None if away is None or number % 3 else [1, 0, 1]
        other = penalty(3, units=2, **options)
        other.load(state)
        parts.append((other.decide(each, steps), straight.decide(each, steps)))
        state = other.state()
    assert all(ours == theirs for ours, theirs in parts)
    assert any(verdict.lasting for verdicts, _ in parts for verdict in verdicts)
    assert any(verdict.new_levels for verdicts, _ in parts for verdict in verdicts)
    known = ("mean", "spread", "weight", "weight_of_squares", "count", "window")
    old = penalty(3, units=2, **options)
    old.load({"detector": {name: state["detector"][name] for name in known}})
    assert [verdict.accepted for verdict in old.decide(column)] == [(0, 1, 2)] * 2
