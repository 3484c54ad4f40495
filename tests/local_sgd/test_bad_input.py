# SPDX-License-Identifier: Apache-2.0
"""Invariant 11 in the real script: one clear error that names the field and the fix, exit code not 0."""

import pytest

from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_failing_pretrain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local_sgd_workers": 3}, ["--local-sgd-workers 3 does not divide the data-parallel size 2"]),
        ({"local_sgd_sync_interval": 0}, ["--local-sgd-sync-interval is 0"]),
        ({"local_sgd_sync_interval": -2}, ["--local-sgd-sync-interval is -2"]),
        ({"local_sgd_warmup_steps": 6}, ["--local-sgd-warmup-steps 6 leaves no local step"]),
        ({"outer_optimizer": "lion"}, ["--outer-optimizer 'lion' is not known", "adamw"]),
        ({"outer_optimizer_lr": "nan"}, ["--outer-optimizer-lr is nan"]),
        ({"outer_optimizer_momentum": 1.5}, ["--outer-optimizer-momentum is 1.5"]),
        (
            {"local_sgd_sync_interval": 0, "outer_optimizer_lr": "nan", "outer_optimizer": "lion"},
            ["3 problems", "--local-sgd-sync-interval", "--outer-optimizer-lr", "'lion'"],
        ),
        ({"local_sgd_workers": 1, "outer_optimizer_lr": 0.5}, ["--local-sgd-workers 1", "no effect"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_by_name_without_a_traceback(options, said):
    exits = run_failing_pretrain(arguments("single", "fp32", workers=2, **options), 2)
    assert all(rank.exit_code != 0 for rank in exits)
    for part in said:
        assert part in exits[0].stderr + exits[0].traceback


def test_one_worker_is_an_ordinary_run():
    from tests.local_sgd.runs import same_state
    from tests.support.pretrain import run_pretrain

    ours = run_pretrain(arguments("dp2", "bf16-distopt", workers=1), 2)
    stock = run_pretrain(arguments("dp2", "bf16-distopt", workers=None), 2, patch="backend-only")
    assert same_state(ours, stock)
