# SPDX-License-Identifier: Apache-2.0
"""Workers that come one by one are judged as if the others had come with them, as they last were."""

import pytest
import torch

from megatron_ext.local_sgd import LocalSGDConfig
from megatron_ext.outer.penalty import Penalty, Verdict

WORKERS = 4


def penalty(**options) -> Penalty:
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=WORKERS, ewma_warmup_steps=4, **options)
    return Penalty(config, workers=WORKERS, units=2)


def drawn(rounds: int) -> torch.Tensor:
    """Return norms of (rounds, workers, units)."""
    generator = torch.Generator().manual_seed(3)
    return 1 + 0.1 * torch.rand((rounds, WORKERS, 2), generator=generator, dtype=torch.float64)


def one_by_one(judge: Penalty, rounds: torch.Tensor) -> list[list[list[Verdict]]]:
    """Return, by round and worker, the verdicts when the workers come in turns."""
    last = torch.zeros(rounds.shape[1:], dtype=torch.float64)
    come = [0] * WORKERS
    found = []
    for norms in rounds:
        found.append([])
        for worker in range(WORKERS):
            last[worker], come[worker] = norms[worker], 1
            found[-1].append(judge.decide(last.clone(), come, fresh={worker}))
    return found


def left_out(found: list[list[list[Verdict]]], unit: int = 0) -> list[list[int]]:
    """Return, by round, who did not count of those who came."""
    return [
        [worker for worker, verdicts in enumerate(round_) if worker not in verdicts[unit].accepted] for round_ in found
    ]


def test_each_learns_from_its_own_norms_what_it_would_learn_in_rounds_of_all():
    rounds = drawn(12)
    together, apart = penalty(skip_anomaly=True, ewma_relearn_rounds=0), penalty(skip_anomaly=True)
    verdicts = [together.decide(norms) for norms in rounds]
    found = one_by_one(apart, rounds)
    assert left_out(found) == [[w for w in range(WORKERS) if w not in units[0].accepted] for units in verdicts]
    mine, theirs = (judge.state()["detector"] for judge in (apart, together))
    for name in ("mean", "spread", "count", "window"):
        assert torch.equal(mine[name], theirs[name]), name


def test_the_last_of_a_round_is_weighted_as_in_a_round_of_all():
    options = {"pseudo_gradnorm_reduce": True, "weight_scale_free": True}
    rounds = drawn(2)
    found = one_by_one(penalty(**options), rounds)
    for norms, round_ in zip(rounds, found, strict=True):
        expected = penalty(**options).decide(norms)
        assert [verdict.weights for verdict in round_[-1]] == [verdict.weights for verdict in expected]


@pytest.mark.parametrize("relative", [False, True])
def test_a_rise_of_one_worker_is_never_a_level_and_is_said_of_that_worker_alone(relative: bool):
    rounds = drawn(30)
    rounds[12:, 2, 0] *= 20
    found = one_by_one(penalty(skip_anomaly=True, ewma_relative=relative, ewma_threshold=6.0), rounds)
    assert left_out(found) == [[]] * 12 + [[2]] * 18
    said = [[worker for worker, verdicts in enumerate(round_) if verdicts[0].reasons] for round_ in found]
    assert said == left_out(found)
    lasting = [number for number, round_ in enumerate(found) for verdicts in round_ if verdicts[0].lasting]
    assert lasting == [21]


def test_a_rise_of_all_is_a_level_a_round_later_than_where_all_come_together():
    rounds = drawn(30)
    rounds[12:] *= 20
    together = penalty(skip_anomaly=True, ewma_threshold=6.0)
    at_once = [len(together.decide(norms)[0].accepted) for norms in rounds]
    assert at_once[11:16] == [WORKERS, 0, 0, 0, WORKERS]
    found = one_by_one(penalty(skip_anomaly=True, ewma_threshold=6.0), rounds)
    # When most have risen the others see it; the first ones have to wait for that.
    assert left_out(found)[11:17] == [[], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1], []]
    assert left_out(found)[17:] == [[]] * 13


@pytest.mark.parametrize("scales", [(8, 4, 2, 1), (1, 1, 1, 10), (10, 1, 1, 1), (1.15, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("rise", [3, 20])
@pytest.mark.parametrize("pace", [1, 4])
def test_whoever_rises_first_and_however_large_it_is_follows_the_others(
    scales: tuple[float, ...], rise: float, pace: int
):
    rounds = drawn(60) * torch.tensor(scales, dtype=torch.float64)[:, None]
    rounds[20:] *= rise
    judge = penalty(skip_anomaly=True)
    # Worker 1 comes seldom.
    last, come, without = torch.zeros(WORKERS, 2, dtype=torch.float64), [0] * WORKERS, [0] * WORKERS
    for number, norms in enumerate(rounds):
        for worker in range(WORKERS):
            if worker == 1 and number % pace:
                continue
            last[worker], come[worker] = norms[worker], 1
            verdict = judge.decide(last.clone(), come, fresh={worker})[0]
            without[worker] += number >= 20 and worker not in verdict.accepted
    assert max(without) <= 3 + 2, without


def test_who_has_reached_a_level_is_forgotten_when_all_have():
    rounds = drawn(40)
    rounds[12:] *= 20
    judge = penalty(skip_anomaly=True, ewma_threshold=6.0)
    one_by_one(judge, rounds[:16])
    middle = judge.state()["detector"]
    assert {"former", "behind"} <= middle.keys()
    again = penalty(skip_anomaly=True, ewma_threshold=6.0)
    again.load({"detector": middle})
    assert left_out(one_by_one(again, rounds[16:])) == left_out(one_by_one(judge, rounds[16:]))
    assert not {"former", "behind"} & judge.state()["detector"].keys()
    together = penalty(skip_anomaly=True, ewma_threshold=6.0)
    for norms in rounds:
        together.decide(norms)
        assert not {"former", "behind"} & together.state()["detector"].keys()


def test_further_workers_weigh_as_the_others_do_on_average():
    (verdict, _) = penalty(pseudo_gradnorm_reduce=True).decide(drawn(1)[0], [1, 0, 1, 1], fresh={0})
    joined = verdict.joined_by({1})
    assert joined.accepted == (0, 1, 2, 3) and sum(joined.weights) == pytest.approx(1)
    assert joined.weights[1] == pytest.approx(0.25)
    for worker in verdict.accepted:
        assert joined.relative_weight(worker) == pytest.approx(verdict.relative_weight(worker))
    assert joined.part_of(0, {0, 1}) == pytest.approx(joined.weights[0] / (joined.weights[0] + 0.25))
    equal = penalty().decide(drawn(1)[0], [1, 0, 1, 0])[0].joined_by({1})
    assert equal.weights == (1 / 3,) * 3 and equal.part_of(2, {1, 2}) == 0.5
