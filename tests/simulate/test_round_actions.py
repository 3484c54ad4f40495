# SPDX-License-Identifier: Apache-2.0
"""The simulated schedule is the engine's."""

import pytest
import torch

from megatron_ext.local_sgd import StreamingConfig
from megatron_ext.simulate.round_actions import actions_by_step
from tests.local_sgd.engines import engine_of
from tests.support.distributed import run_ranks

CASES = [
    (interval, {"fragments": fragments, "sync_delay": delay, "update_alpha": alpha, "eager": eager})
    for interval, fragments, delay, alpha, eager in (
        *((5, 1, 0, 0.0, False), (6, 3, 0, 0.0, False), (2, 4, 0, 0.0, False)),
        *((7, 1, 0, 0.5, False), (7, 2, 1, 0.0, False), (6, 4, 5, 0.5, False), (10, 3, 4, 0.5, False)),
        *((1, 1, 0, 0.0, True), (5, 1, 0, 0.0, True), (6, 3, 0, 0.0, True)),
    )
]


def what_engines_do():
    """Return for every case, by step of three intervals, what an engine's fragments were asked to do."""
    from megatron_ext.local_sgd.exchange.fragment import Fragment

    done = []
    for name in ("sync", "send", "turn", "turn_late", "apply"):
        original = getattr(Fragment, name)

        def recorded(self, *args, name=name, original=original, **kwargs):
            done.append(("end" if name == "apply" else name, self._index))
            return original(self, *args, **kwargs)

        setattr(Fragment, name, recorded)
    found = []
    for interval, streaming in CASES:
        units = [f"layer.{layer}" for layer in range(4)]
        engine = engine_of([torch.ones(2) for _ in units], interval=interval, units=units, streaming=streaming)
        engine.take_anchor()
        steps = []
        for _ in range(3 * interval):
            done.clear()
            if engine.count_step():
                engine.advance()
            steps.append(list(done))
        found.append(steps)
    return found


def test_after_every_step_the_engine_does_what_is_simulated():
    (found,) = run_ranks(what_engines_do, 1)
    for (interval, streaming), steps in zip(CASES, found, strict=True):
        first, later = actions_by_step(StreamingConfig(**streaming), interval)
        planned = [
            [(action.kind, action.fragment) for action in actions.get(step, ())]
            for actions in (first, later, later)
            for step in range(1, interval + 1)
        ]
        assert planned == steps, (interval, streaming)


@pytest.mark.parametrize(("interval", "streaming"), CASES)
def test_every_fragment_has_one_round_in_every_interval(interval: int, streaming: dict):
    for actions in actions_by_step(StreamingConfig(**streaming), interval):
        begun = [one.fragment for due in actions.values() for one in due if one.kind in ("sync", "send")]
        assert sorted(begun) == list(range(streaming["fragments"]))
