# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous models, whose layers lack attention or an MLP or have them linear or narrower, switch strategies."""

from tests.hot_switch.runs import assert_equal_except_for_rounding, assert_resumed, hot_run, stock_run
from tests.support.heterogeneous import heterogeneous

HOT = (["1,2,2", "4,1,1", "2,1,2"], [32, 16, 8, 0])


def test_hot_equals_static(tmp_path):
    options = {**heterogeneous(tmp_path), "train_iters": 6}
    saving = {"save": str(tmp_path), "save_interval": 3}
    hot = hot_run(*HOT, **saving, **options)
    assert_equal_except_for_rounding(hot, stock_run("1,2,2", **options))
    resumed = hot_run(*HOT, load=str(tmp_path), ckpt_step=3, **options)
    assert_resumed(resumed, hot, after=3)
