# SPDX-License-Identifier: Apache-2.0
"""What Megatron's parser refuses is one line of one rank, not the usage of all of its options on each."""

import pytest

from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"local_sgd_sync_intervall": 4},
            "unrecognized arguments: --local-sgd-sync-intervall 4; did you mean --local-sgd-sync-interval?",
        ),
        ({"no_such_thing_anywhere": 4}, "unrecognized arguments: --no-such-thing-anywhere 4"),
        ({"train_iters": "0.5"}, "argument --train-iters: invalid int value: '0.5'"),
    ],
)
def test_what_the_parser_refuses_is_one_line_with_what_was_meant(options, said):
    ranks = run_failing_pretrain(toy_gpt(**options), 2)
    assert [rank.exit_code for rank in ranks] == [2, 2]
    lines = [line for rank in ranks for line in rank.stderr.splitlines() if "error" in line]
    assert lines[0] == f"megatron-ext: error: {said}"
    assert not any("usage:" in rank.stderr or "Traceback" in rank.stderr for rank in ranks)
