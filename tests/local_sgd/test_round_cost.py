# SPDX-License-Identifier: Apache-2.0
"""What rounds cost, in figures that can be checked by hand."""

import pytest

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.round_cost import MeetingCost, WorkerLink, compare, plainest, synchronous_step

LINK = WorkerLink(workers=4, parameters=10**9, step_seconds=2.0, bandwidth=8e9, latency=0.5)
"""A gigabyte per second: what a round of fp32 sends, 2 * 3/4 * 4 GB, takes 6 s, and its 6 messages 3 s more."""


def found(interval: int, codec: str, delayed: bool = False) -> MeetingCost:
    """Return what one interval costs with one codec."""
    return next(one for one in compare(LINK, [interval], [codec]) if (one.delay > 0) == delayed)


def test_a_round_moves_as_many_bytes_as_an_all_reduce():
    plain = found(9, "fp32")
    assert (plain.round_bytes, plain.round_seconds) == (6e9, 9.0)
    assert plain.utilisation == pytest.approx(18 / 27)
    assert found(9, "bf16").round_bytes == 3e9
    # A bf16 scale per 128 values.
    assert found(9, "int8").round_bytes == pytest.approx(1.5 * (1 + 2 / 128) * 1e9, rel=1e-6)


def test_results_of_the_largest_values_take_as_many_as_there_are_workers():
    # 1/32 outward, four times that homeward; 4 bytes each, of which there are 3/4.
    assert found(9, "topk").round_bytes == pytest.approx(0.75 * (1 + 4) / 32 * 4e9, rel=1e-3)


def test_a_delay_hides_whole_steps_and_a_round_ends_before_the_next_begins():
    assert (found(9, "fp32", delayed=True).delay, found(9, "fp32", delayed=True).utilisation) == (6, 1.0)
    short = found(3, "fp32", delayed=True)
    assert (short.delay, short.utilisation) == (2, pytest.approx(6 / 11))
    assert [one.delay for one in compare(LINK, [1], ["fp32"])] == [0]
    # Two steps hide 4 of the 4.5 s outward, one hides 2 of those homeward.
    odd = found(4, "fp32", delayed=True)
    assert (odd.delay, odd.utilisation) == (3, pytest.approx(8 / (8 + 0.5 + 2.5)))


def test_fragments_wait_each_for_their_own_round_and_need_a_shorter_delay():
    # Halves of 3.75 s a round and way, half of it latency; one of three quarters takes 2.25 + 1.5 s a way.
    equal = [one for one in compare(LINK, [20], ["fp32"], [[5 * 10**8] * 2]) if one.fragments == 2]
    assert [(one.delay, one.utilisation, one.round_bytes, one.round_seconds) for one in equal] == [(4, 1.0, 6e9, 12.0)]
    (short,) = [one for one in compare(LINK, [3], ["fp32"], [[75 * 10**7, 25 * 10**7]]) if one.fragments == 2]
    # Of 3 steps one is between the fragments' rounds, and hides 2 of the 3.75 and of the 2.25 s outward.
    assert (short.delay, short.utilisation) == (1, pytest.approx(6 / (6 + (1.75 + 3.75) + (0.25 + 2.25))))
    assert short.step_seconds == pytest.approx(14 / 3)


def test_a_token_takes_its_part_of_a_step_and_of_the_waiting():
    link = WorkerLink(**{**vars(LINK), "step_tokens": 500})
    plain = next(one for one in compare(link, [9], ["fp32"]) if not one.delay)
    assert plain.token_seconds == pytest.approx(27 / 9 / (4 * 500))
    assert found(9, "fp32").token_seconds is None


def test_synchronous_training_reduces_in_every_step():
    assert synchronous_step(LINK) == pytest.approx(2 + 3 + 3)


def test_what_changes_training_least_is_proposed():
    settings = list(compare(LINK, [10, 50, 100], ["fp32", "int8"]))
    assert plainest(settings, 0.9) == found(50, "fp32")
    assert plainest(settings, 0.97) == found(100, "int8")
    assert plainest(settings, 0.98) == found(10, "fp32", delayed=True)
    assert plainest(list(compare(LINK, [1], ["fp32"])), 0.9) is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("workers", 1, "--workers is 1; give a number at least 2"),
        ("step_seconds", 0.0, "--step-seconds is 0"),
        ("bandwidth", -1e9, "--bandwidth is -1"),
        ("latency", float("nan"), "--latency is nan"),
        ("step_tokens", 0, "--step-tokens is 0; give a number of at least 1"),
    ],
)
def test_what_cannot_be_is_named(field: str, value: float, said: str):
    link = WorkerLink(**{**vars(LINK), field: value})
    with pytest.raises(UserError, match=said):
        link.check()
