# SPDX-License-Identifier: Apache-2.0
"""A guest has memory only while it trains, and never more than its own tensors take."""

import gc

import pytest
import torch

from tests.hot_switch.runs import arguments
from tests.support.pretrain import run_pretrain

WEIGHED = []
"""On a rank, of every step but the first: (bytes more than at its beginning, their bound) where each guest is about to
train and where it has trained, and the bytes that are left of the step."""
SMALL = 1 << 16
"""Bytes of the rows, masks and counters of a step."""


def live_bytes():
    """Return the bytes of all tensors' memory in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"]
    return sum({value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensors}.values())


def weigh():
    """Weigh all memory where steps begin and end, and where each guest is about to train."""
    from megatron_ext.hot_switch.runtime import step

    run, train = step.SwitchingStep.run, step._forward_backward
    begin, bounds, turns = [0], [0], []

    def numel(model):
        return sum(entry.parameter.numel() for entry in model.view.entries)

    def run_weighed(self, original, **call):
        begin[0], bounds[0] = live_bytes(), 0
        turns.clear()
        losses = run(self, original, **call)
        WEIGHED.append((list(turns), live_bytes() - begin[0]))
        return losses

    def train_weighed(guest, *arguments):
        # Its parameters and fp32 gradients; as many of the guest before it; and what others have sent home.
        own = (guest.chunks[0].config.params_dtype.itemsize + 4 + 4 * guest.takes_gradients) * numel(guest)
        # Messages are in flight until its first forward pass is over.
        messages = 0 if guest._arriving is None else 2 * guest._from_home.itinerary.staging_bytes
        turns.append((live_bytes() - begin[0], own + bounds[0] + messages))
        losses = train(guest, *arguments)
        turns.append((live_bytes() - begin[0], own + bounds[0]))
        return losses

    send = step.SwitchingStep._send_gradients

    def sent(self, *arguments):
        send(self, *arguments)
        bounds[0] = 4 * numel(self._home) if self._has_sums else 0

    step.SwitchingStep.run, step._forward_backward = run_weighed, train_weighed
    step.SwitchingStep._send_gradients = sent


def weighed(model, optimizer, args):
    """Return what was weighed."""
    return WEIGHED[1:]


@pytest.mark.parametrize(
    ("strategies", "options"),
    [
        (["1,2,2", "4,1,1", "2,1,2"], {}),
        (["2,2,1", "1,4,1", "1,2,2"], {"bf16": True, "use_distributed_optimizer": True}),
    ],
    ids=["over home", "from guest to guest"],
)
def test_a_guest_has_memory_for_its_own_tensors_and_only_while_it_trains(strategies, options):
    command = arguments(strategies, [32, 16, 8, 0], train_iters=5, hidden_size=128, **options)
    for rank in run_pretrain(command, 4, probe=weighed, before=weigh):
        assert len(rank.probe) == 4
        for turns, left in rank.probe:
            assert len(turns) == 4
            for taken, bound in turns:
                assert taken <= bound + SMALL
            assert left <= SMALL
