# SPDX-License-Identifier: Apache-2.0
"""What Megatron does by the largest attention logits, inside a worker: on a double of Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.local_sgd.runs import arguments, same_state, worker_slices
from tests.support.presets import LAYOUTS, Options
from tests.support.pretrain import RankOutcome, as_worker, run_pretrain
from tests.support.transformer_engine import accept_transformer_engine, is_of_release
from tests.transport.meter import crossing_calls, install_meter

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

ON_THE_DOUBLE: Options = {"transformer_impl": "transformer_engine"}
CLIPPED: Options = {**ON_THE_DOUBLE, "qk_clip": True, "qk_clip_threshold": 1e-3}
LOGGED: Options = {**ON_THE_DOUBLE, "log_max_attention_logit": True}
CASES: dict[str, tuple[str, str, Options]] = {
    "logged": ("tp2", "bf16-distopt", LOGGED),
    "clipped": ("dp2", "bf16", CLIPPED),
    "clipped, latent": ("latent-tp2", "bf16", CLIPPED),
    "clipped, muon": ("dp2", "bf16-distopt", {**CLIPPED, "optimizer": "muon"}),
}


def largest_logits(model: Any, optimizer: Any, args: Any) -> list[float]:
    """Probe: what each step has found."""
    return FOUND


FOUND: list[float] = []


def remember_logits() -> None:
    """Keep what each step has found."""
    from megatron.training import training

    clip = training.clip_qk

    def remember(*args: Any, **kwargs: Any) -> float:
        FOUND.append(clip(*args, **kwargs))
        return FOUND[-1]

    training.clip_qk = remember


def run(case: str, workers: int | None, **more: Any) -> list[RankOutcome]:
    before, patch = more.pop("before", ()), more.pop("patch", "script")
    probe = more.pop("probe", largest_logits)
    layout, precision, options = CASES[case]
    command = arguments(layout, precision, workers=workers, **{**options, **more})
    first = (is_of_release, accept_transformer_engine, remember_logits)
    world_size = LAYOUTS[layout].world_size(workers or 1)
    return run_pretrain(command, world_size, before=(*first, *before), probe=probe, patch=patch)


@pytest.mark.parametrize("case", CASES)
def test_a_worker_goes_by_its_own_logits_as_a_stock_job_does(case: str):
    together = run(case, 2, local_sgd_sync_interval=100)
    found = []
    for worker, ranks in enumerate(worker_slices(together, CASES[case][0], 2)):
        alone = run(case, None, patch="backend-only", before=(as_worker(worker, 2),))
        assert same_state(ranks, alone)
        assert [rank.probe for rank in ranks] == [rank.probe for rank in alone]
        found.append(ranks[0].probe)
    assert len(found[0]) == 6 and found[0] != found[1]


def test_in_warmup_the_logits_of_all_workers_count():
    # Workers that clip apart would have other weights where warm-up ends, which is an error.
    ranks = run("clipped", 2, local_sgd_warmup_steps=3, local_sgd_sync_interval=100)
    first, second = (ranks[0].probe for ranks in worker_slices(ranks, CASES["clipped"][0], 2))
    assert first[:3] == second[:3] and first[3:] != second[3:]


def test_weights_are_clipped():
    clipped, not_clipped = (run("clipped", None, patch="backend-only", qk_clip_threshold=most) for most in (1e-3, 100))
    assert max(clipped[0].probe[1:]) < max(not_clipped[0].probe[1:])


@pytest.mark.parametrize("case", ["clipped", "clipped, muon"])
def test_workers_end_equal_and_a_resume_in_mid_interval_keeps_the_bits(tmp_path: Path, case: str):
    through = run(case, 2, local_sgd_sync_interval=3, save=str(tmp_path), save_interval=4)
    first, second = worker_slices(through, CASES[case][0], 2)
    assert same_state(first, second)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert same_state(run(case, 2, local_sgd_sync_interval=3, load=str(tmp_path)), through)


def test_steps_without_a_round_cross_workers_zero_times():
    options = {"train_iters": 8, "local_sgd_sync_interval": 4, "log_interval": 100}
    for rank in run("clipped", 2, **options, before=(install_meter,), probe=crossing_calls):
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [3, 7], rank.probe
