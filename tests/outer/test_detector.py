# SPDX-License-Identifier: Apache-2.0
"""Series of norms: no lasting rise locks the detector out, and who strays alone is caught meanwhile all the same."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from megatron_ext.outer.detector import AnomalyDetector
from tests.support.every_run import one_of_each

SERIES = 80
"""Units, which are independent series."""
ROUNDS = 3
"""After which a level is learned, as by default."""
QUIET = 30
"""Rounds after the warm-up, before anything happens."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep torch from sharing out tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def detector(workers: int, warmup: int, **options) -> AnomalyDetector:
    return AnomalyDetector(
        workers, SERIES, **{"alpha": 0.02, "warmup": warmup, "threshold": 3.0, "relearn": ROUNDS, **options}
    )


def spread(kinds: Sequence) -> list:
    """Return one of the kinds for every series."""
    return [kinds[number % len(kinds)] for number in range(SERIES)]


def noisy(levels, workers: int, noise: float | Sequence[float], seed: int = 0) -> torch.Tensor:
    """Return norms about levels, (rounds, workers, SERIES).

    Args:
        levels: one per round, or one per round and series.
        workers: their number.
        noise: relative, for all series or for each.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.as_tensor(levels, dtype=torch.float64)
    found = found.view(len(found), 1, -1)
    scatter = torch.randn(len(found), workers, SERIES, generator=generator, dtype=torch.float64)
    return found * (1 + torch.as_tensor(noise, dtype=torch.float64) * scatter).clamp(min=0.1)


def rejections(ours: AnomalyDetector, norms: torch.Tensor) -> torch.Tensor:
    """Return which norms are rejected, of the same shape; the others are learned."""
    found = []
    for column in norms:
        verdicts = ours.verdicts(column)
        ours.learn(column, ~verdicts)
        found.append(verdicts)
    return torch.stack(found)


def skipped(rejected: torch.Tensor) -> torch.Tensor:
    """Return in how many rounds each series lost all workers."""
    return rejected.all(dim=1).sum(dim=0)


def share(rejected: torch.Tensor) -> float:
    return float(rejected.double().mean())


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("warmup", one_of_each([10, 120], {0}))
def test_a_step_that_all_workers_share_skips_a_unit_in_no_more_than_the_stated_rounds(workers, warmup):
    kinds = spread(list(itertools.product([1.5, 2.0], [0.05, 0.15])))
    before, rises, noise = warmup + QUIET, *([kind[place] for kind in kinds] for place in (0, 1))
    norms = noisy([[1.0] * SERIES] * before + [rises] * 150, workers, noise)
    found = rejections(detector(workers, warmup), norms)[before:]
    assert skipped(found).double().mean() <= ROUNDS + (0.5 if workers == 1 else 0)
    # Rounds of false alarms, of which one worker that is alone has some without any step, are not part of it.
    assert skipped(found[: ROUNDS + 3]).max() <= ROUNDS + (workers == 1)
    assert workers == 1 or (skipped(found) > ROUNDS).sum() <= 1
    assert share(found[20:]) < 0.005


CURVES = [
    [1 + 0.003 * number for number in range(300)],
    [1 + 0.02 * min(number, 100) for number in range(300)],
    [1 + 0.1 * min(number, 90) for number in range(300)],
    [1.05 ** min(number, 60) for number in range(300)],
]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("warmup", one_of_each([10, 120], {0}))
def test_a_ramp_skips_few_rounds_however_long_it_rises(workers, warmup):
    kinds = spread(list(itertools.product(CURVES, [0.02, 0.05])))
    before, curves, noise = warmup + QUIET, *([kind[place] for kind in kinds] for place in (0, 1))
    norms = noisy([[1.0] * SERIES] * before + list(zip(*curves, strict=True)), workers, noise)
    found = rejections(detector(workers, warmup), norms)[before:]
    # For a rise by up to the eighteenfold: as for one step on the average, as for two in the most unlucky series.
    assert skipped(found).double().mean() <= ROUNDS + (workers == 1)
    assert skipped(found).max() <= (2 * ROUNDS + 1 if workers > 1 else 5 * ROUNDS)
    assert share(found[-100:]) < 0.005


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_one_bad_worker_is_caught_before_a_step_while_it_is_learned_and_right_after_it(workers, relative):
    if relative and workers < 3:
        return  # of two, neither is the measure
    before = 10 + QUIET
    kinds = spread(list(itertools.product(range(before - 2, before + 6), [10.0, math.inf, math.nan], [0.05, 0.15])))
    norms = noisy([1.0] * before + [2.0] * 60, workers, [noise for *_, noise in kinds])
    is_bad = torch.zeros(len(norms), SERIES, dtype=torch.bool)
    for series, (first, size, _) in enumerate(kinds):
        norms[first : first + 2, 0, series] *= size
        is_bad[first : first + 2, series] = True
    ours = detector(workers, 10, relative=relative)
    found = rejections(ours, norms)
    assert found[:, 0][is_bad].all()
    # Nobody has learned from it: after the step all are accepted, and it would be caught again.
    assert share(found[before + 20 :]) < 0.015
    again = torch.full((workers, SERIES), 2.0, dtype=torch.float64)
    again[0] *= 10.0
    verdicts = ours.verdicts(again)
    assert verdicts[0].all() and not verdicts[1:].any()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_what_one_worker_alone_has_forever_is_never_a_level(workers, relative):
    if relative and workers < 3:
        return  # of two, neither is the measure
    norms = noisy([1.0] * 250, workers, 0.05)
    norms[50:, 0] *= torch.tensor(spread([2.0, 10.0]), dtype=torch.float64)
    found = rejections(detector(workers, 10, relative=relative), norms)[50:]
    assert found[:, 0].all()
    assert share(found[:, 1:]) < 0.005


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_half_of_the_workers_are_no_majority(workers):
    norms = noisy([1.0] * 150, workers, 0.05)
    norms[50:, : workers // 2] *= 3.0
    assert rejections(detector(workers, 10), norms)[50:, : workers // 2].all()


@pytest.mark.parametrize(("workers", "wide"), [(4, 1), (4, 2), (2, 1), (3, 2)])
def test_a_level_that_others_are_accepted_at_locks_nobody_out(workers, wide):
    """Some workers' norms have scattered so widely that theirs are accepted at the new level."""
    norms = noisy([1.0] * 60 + [1.5] * 100, workers, 0.03)
    norms[:60, :wide] = noisy([1.0] * 60, wide, 0.4, seed=1)
    found = rejections(detector(workers, 10), norms)[60:]
    assert found[:1, wide:].all()
    assert share(found[20:]) < 0.005


def test_who_was_away_while_a_level_was_learned_is_not_locked_out():
    norms = noisy([1.0] * 40 + [2.0] * 60, 3, 0.05)
    ours = detector(3, 10)
    found = []
    for number, column in enumerate(norms):
        here = torch.ones(3, SERIES, dtype=torch.bool)
        here[2] = not 40 <= number < 60
        column = column * here
        accepted = here & ~ours.verdicts(column)
        ours.learn(column, accepted, here)
        found.append(here & ~accepted)
    assert torch.stack(found[60:62])[:, 2].all()
    assert share(torch.stack(found[63:])) < 0.005


def test_who_is_new_neither_keeps_a_level_from_being_learned_nor_vouches_for_a_bad_one():
    norms = noisy([1.0] * 40 + [2.0] * 20, 3, 0.05)
    ours, strict = detector(3, 10), detector(3, 10)
    for each, size in ((ours, 1.0), (strict, 5.0)):
        for number, column in enumerate(norms):
            here = torch.ones(3, SERIES, dtype=torch.bool)
            here[1:] = number >= 36
            present = column * here
            if number >= 40:
                present[0] *= size
            accepted = here & ~each.verdicts(present)
            each.learn(present, accepted, here)
        rejected = ~accepted[0]
        assert rejected.all() if size > 1 else share(rejected) < 0.05


@pytest.mark.parametrize("relative", [False, True])
def test_a_fall_is_not_an_anomaly_and_the_way_back_is_learned(relative):
    norms = noisy([2.0] * 60 + [1.0] * 60 + [2.0] * 60, 4, 0.05)
    found = rejections(detector(4, 10, relative=relative), norms)
    assert share(found[60:120]) < 0.01
    assert skipped(found).max() <= ROUNDS


@pytest.mark.parametrize("stated", [1, 2, 5])
def test_the_number_of_rounds_is_the_users(stated):
    norms = noisy([1.0] * 40 + [3.0] * 60, 3, 0.05)
    found = rejections(detector(3, 10, relearn=stated), norms)
    assert skipped(found[40:]).double().mean() == pytest.approx(stated, abs=0.1)
    assert skipped(found[40:]).max() <= stated and share(found[40 + stated :]) < 0.01


@pytest.mark.parametrize("stated", [1, 2, 5])
def test_right_after_a_level_was_learned_it_has_a_limit(stated):
    norms = noisy([1.0] * 40 + [3.0] * (stated + 1), 3, 0.05)
    norms[-1, 0] = 9.0
    assert rejections(detector(3, 10, relearn=stated), norms)[-1, 0].all()


def test_a_new_level_says_whose_it_is_and_what_it_was():
    ours = AnomalyDetector(3, 2, alpha=0.1, warmup=3, threshold=3.0, relearn=2)
    said = []
    for number in range(14):
        column = torch.full((3, 2), 1.0 + 0.01 * (-1) ** number, dtype=torch.float64)
        if number >= 10:
            column[:2, 1] *= 4.0
        said.append(ours.learn(column, ~ours.verdicts(column)))
    assert [len(levels) for levels in said] == [0] * 11 + [2] + [0] * 2
    for level, worker in zip(said[11], (0, 1), strict=True):
        assert (level.worker, level.unit) == (worker, 1)
        assert (level.before, level.now) == (pytest.approx(1.0, abs=0.01), pytest.approx(4.0, abs=0.01))


def never() -> AnomalyDetector:
    return detector(3, 10, relearn=0)


def test_without_learning_levels_a_rise_is_rejected_forever_as_in_the_official_implementation():
    norms = noisy([1.0] * 60 + [2.0] * 300, 3, 0.05)
    assert rejections(never(), norms)[60:].all()


def test_where_nothing_is_rejected_learning_levels_changes_no_bit():
    for bias_correction in (True, False):
        one, other = (detector(3, 10, relearn=rounds, bias_correction=bias_correction) for rounds in (0, ROUNDS))
        norms = noisy([1.0] * 10 + [0.99**number for number in range(100)], 3, 0.01)[:, :, :1].expand(-1, -1, SERIES)
        rejected = rejections(one, norms), rejections(other, norms)
        assert not rejected[0].any() and not rejected[1].any()
        assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


@pytest.mark.parametrize("relative", [False, True])
def test_a_detector_that_was_saved_in_the_middle_of_a_rise_resumes_bit_for_bit(relative):
    norms = noisy([1.0] * 40 + [1.5] * 20, 4, 0.1)
    norms[38:, 0] *= 10
    straight = detector(4, 10, relative=relative)
    whole = rejections(straight, norms)
    parts, saved = [], None
    for column in norms:
        each = detector(4, 10, relative=relative)
        if saved is not None:
            each.load(saved)
        parts.append(rejections(each, column[None]))
        saved = each.state()
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(value.nan_to_num(), saved[name].nan_to_num()) for name, value in straight.state().items())


def test_the_state_of_an_earlier_release_is_accepted_and_counting_restarts():
    norms = noisy([1.0] * 40 + [2.0] * 40, 3, 0.05)
    earlier = never()
    rejections(earlier, norms[:42])
    later = detector(3, 10)
    later.load(earlier.state())
    found = rejections(later, norms[42:])
    assert found[:ROUNDS].all() and skipped(found).max() == ROUNDS


@pytest.mark.parametrize("stated", [2, 5])
def test_a_saved_detector_resumes_with_another_number_of_rounds_and_more_workers(stated):
    norms = noisy([1.0] * 40 + [2.0] * 40, 6, 0.05)
    first = detector(3, 10)
    rejections(first, norms[:42, :3])
    second = detector(6, 10, relearn=stated)
    second.load(first.state())
    found = rejections(second, norms[42:])
    assert skipped(found).max() <= max(stated - 2, 1) and share(found[stated:]) < 0.005


def test_the_limit_is_that_many_unbiased_standard_deviations_above_the_weighted_mean():
    """A sample's variance around its own mean is too small; with n equal weights by 1 - 1/n."""
    alpha, values = 0.3, [1.0, 1.4, 0.7, 1.2]
    ours = AnomalyDetector(1, 1, alpha=alpha, warmup=4, threshold=3.0)
    for value in values:
        column = torch.full((1, 1), value, dtype=torch.float64)
        ours.learn(column, ~ours.verdicts(column))
    weights = [alpha * (1 - alpha) ** age for age in reversed(range(4))]
    total = math.fsum(weights)
    mean = math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total
    squares = math.fsum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    variance = squares / (total - math.fsum(weight**2 for weight in weights) / total)
    limit = mean + 3 * math.sqrt(variance)
    for norm, is_anomalous in ((limit * (1 - 1e-9), False), (limit * (1 + 1e-9), True)):
        assert bool(ours.verdicts(torch.full((1, 1), norm, dtype=torch.float64))) == is_anomalous


def test_after_a_short_warm_up_false_alarms_are_as_rare_as_the_threshold_says():
    """Without the correction for degrees of freedom a warm-up of 3 rounds would flag nearly twice as many."""
    found = []
    for seed in range(20):
        ours = detector(1, 3)
        found.append(rejections(ours, noisy([1.0] * 4, 1, 0.05, seed))[3])
    # Student's t with 2 degrees of freedom, of a value against the mean of 3 others: P(t > 3 / sqrt(4 / 3)) = 0.061.
    assert torch.stack(found).double().mean() == pytest.approx(0.061, abs=0.02)
