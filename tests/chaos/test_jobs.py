# SPDX-License-Identifier: Apache-2.0
"""Megatron jobs keep the sync service's promises under seeded faults."""

from pathlib import Path

import pytest

from tests.chaos.jobs import run_jobs
from tests.chaos.report import as_table, figures
from tests.chaos.schedule import draw
from tests.chaos.settings import Settings
from tests.sync_service.service import Zygote


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_promises_hold_for_jobs_of_one_and_two_ranks(zygote: Zygote, tmp_path: Path, seed: int):
    faults = draw(seed, seconds=40, faults_per_hour=720, peers=("p0", "p1"))
    history = run_jobs(Settings.of_jobs(seed), faults, seconds=40, folder=tmp_path, zygote=zygote)
    found = figures(history)
    assert len(faults) > 3 and not found["violations"], as_table(found)
