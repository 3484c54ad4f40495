# SPDX-License-Identifier: Apache-2.0
"""A script's own callbacks, of releases that have them, fire beside features, once in each iteration of the loop."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_pretrain

ROOT = find_spec("megatron")
HAS_CALLBACKS = ROOT is not None and any(
    (Path(folder) / "training" / "callbacks.py").is_file() for folder in ROOT.submodule_search_locations or ()
)


def count_events():
    """Register a callback for every event, as a script does that hands them to `pretrain`."""
    from megatron.training import callbacks, training

    training.fired = []
    original = training.normalize_callbacks

    def normalize_callbacks(given):
        manager = original(given) or callbacks.CallbackManager()
        for event in callbacks.VALID_EVENTS:
            manager.register(event, lambda context, event=event: training.fired.append(event))
        return manager

    training.normalize_callbacks = normalize_callbacks


def fired(model, optimizer, args):
    from collections import Counter

    from megatron.training import training

    return dict(Counter(training.fired))


pytestmark = pytest.mark.skipif(
    not HAS_CALLBACKS, reason="this release of Megatron has no callbacks for its training loop"
)


def test_callbacks_of_a_script_fire_as_often_as_without_features():
    loop = {"train_iters": 5, "log_interval": 2, "eval_interval": 2, "eval_iters": 2}
    alone, *_ = run_pretrain(arguments("single", "fp32", workers=None, **loop), 1, before=count_events, probe=fired)
    rounds = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2, **loop)
    beside, *_ = run_pretrain(rounds, 2, before=count_events, probe=fired)
    assert alone.probe["on_train_step_end"] == 5
    assert beside.probe == alone.probe


def test_where_workers_meet_by_time_a_step_of_callbacks_is_a_meeting(tmp_path):
    steps = [[1, 2], [3, 1], [2, 1], [1, 1]]
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in steps))
    by_time = {"local_sgd_use_async": True, "local_sgd_min_total_global_steps": 1}
    command = arguments("single", "fp32", workers=2, **by_time, local_sgd_replay_meetings=str(file))
    ranks = run_pretrain(command, 2, before=count_events, probe=fired)
    assert [rank.probe["on_train_step_end"] for rank in ranks] == [len(steps)] * 2
