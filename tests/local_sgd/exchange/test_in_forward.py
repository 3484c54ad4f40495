# SPDX-License-Identifier: Apache-2.0
"""Rounds that end unit by unit in the next forward pass: the same bits, and nothing is used before it is there."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import engine_of, start_groups
from tests.local_sgd.runs import local_run, same_state
from tests.support.distributed import run_ranks
from tests.support.every_run import one_of_each

SIZES = [(30, 70), (7,), (400,), (20000,), (50,)]
UNITS = ["embedding", "layer.0", "layer.0", "layer.1", "final_norm"]
GUARD = {"skip_anomaly": True, "ewma_warmup_steps": 2, "pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 1.0}


def stepped(values, step):
    for value in values:
        value += torch.randn(value.shape, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def compared(penalty):
    """Return values of rounds at the end of a step, of rounds in the forward pass, and what the reports say."""
    groups = start_groups()
    both = []
    for in_forward in (False, True):
        values = [torch.zeros(size) for size in SIZES]
        options = {**penalty, "sync_in_forward": in_forward}
        engine = engine_of(values, units=UNITS, groups=groups, penalty=options)
        engine.take_anchor()
        reports = []
        for step in range(4):
            stepped(values, step)
            assert engine.count_step()
            progress = engine.advance()
            assert progress.changed is not in_forward
            reports += progress.reports
            if in_forward:
                for units in (["embedding"], ["layer.1", "layer.0"], ["layer.1"]):
                    engine.land(units)
                if step % 2:
                    engine.land(["final_norm"])
                reports += engine.conclude().reports
                assert not engine.conclude().reports
            assert engine.synced
        both.append(([value.tolist() for value in values], [report.unit_norms for report in reports]))
    return both


@pytest.mark.parametrize("penalty", [{}, GUARD], ids=["plain", "guarded"])
def test_values_and_reports_are_those_of_rounds_at_the_end_of_a_step(penalty):
    for at_once, in_forward in run_ranks(compared, 3, penalty):
        assert in_forward == at_once
        assert len(in_forward[1]) == 4


def landed():
    """Return for every unit whether its values are the synced ones after a forward pass has asked for the first."""
    values = [torch.zeros(size) for size in SIZES]
    engine = engine_of(values, units=UNITS, penalty={"sync_in_forward": True})
    engine.take_anchor()
    stepped(values, 0)
    before = [value.clone() for value in values]
    engine.count_step()
    engine.advance()
    engine.land(["embedding"])
    unchanged = [torch.equal(value, was) for value, was in zip(values, before, strict=True)]
    engine.conclude()
    return unchanged, [torch.equal(value, was) for value, was in zip(values, before, strict=True)]


def test_a_unit_is_waited_for_when_it_is_asked_for_and_the_next_one_is_in_flight():
    for unchanged, changed in run_ranks(landed, 2):
        assert not unchanged[0]
        assert unchanged[3:] == [True, True]
        assert changed == [False] * len(SIZES)


def non_finite():
    """Return the error of a round whose worker 1 has non-finite values."""
    values = [torch.zeros(size) for size in SIZES]
    engine = engine_of(values, units=UNITS, penalty={"sync_in_forward": True})
    engine.take_anchor()
    if dist.get_rank() == 1:
        values[2][3] = float("nan")
    engine.count_step()
    engine.advance()
    try:
        engine.conclude()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_non_finite_worker_ends_the_run_when_the_round_is_concluded():
    for said in run_ranks(non_finite, 2):
        assert "worker 1 had non-finite weights in layer.0" in said


SCHEDULE = {"local_sgd_sync_interval": 2, "local_sgd_warmup_steps": 1, "train_iters": 8}


@pytest.mark.parametrize(
    ("layout", "precision", "extra"),
    one_of_each(
        [
            ("single", "bf16", {}),
            ("single", "fp32", {"eval_interval": 3, "eval_iters": 1}),
            ("dp2", "bf16-distopt-overlap", {}),
            ("pp2-vpp2", "bf16-distopt-overlap", {"global_batch_size": 8}),
            ("moe-ep2", "bf16-distopt-overlap", {f"local_sgd_{name}": value for name, value in GUARD.items()}),
        ],
        {4},
    ),
)
def test_training_keeps_its_bits_and_saves_what_came_in_the_forward_pass(tmp_path, layout, precision, extra):
    options = {**SCHEDULE, **extra}
    at_once = local_run(layout, precision, workers=2, **options)
    saves = {"save": str(tmp_path), "save_interval": 3}  # rounds are after iterations 3, 5, and 7
    in_forward = local_run(layout, precision, workers=2, local_sgd_sync_in_forward=True, **saves, **options)
    assert same_state(in_forward, at_once)
    assert [rank.losses for rank in in_forward] == [rank.losses for rank in at_once]
    assert (tmp_path / "local_sgd_rounds.jsonl").read_text().count('"round"') == 3


def test_rounds_in_the_forward_pass_are_concluded_without_a_checkpoint_too():
    options = {**SCHEDULE, "train_iters": 7}
    at_once = local_run("pp2", "bf16", workers=2, **options)
    assert same_state(local_run("pp2", "bf16", workers=2, local_sgd_sync_in_forward=True, **options), at_once)
