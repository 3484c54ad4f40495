# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job do together."""

import pytest

from megatron_ext.errors import UserError
from tests.support.distributed import run_ranks


def together(case: str) -> object:
    import torch.distributed as dist

    from megatron_ext.sync_service.peer.job import Ranks

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Ranks(dist.group.WORLD)

    def function() -> int:
        if case == "one fails" and rank == 1:
            raise UserError("rank 1 cannot")
        if case == "a defect" and rank == 1:
            raise KeyError("missing")
        return 10 * rank

    def first() -> int:
        if case == "a defect of the first":
            raise ValueError("odd")
        return rank + 5

    try:
        return job.on_first(first), job.on_all(function)
    except (UserError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_first_speaks_for_all_and_all_know_what_each_has_done():
    assert run_ranks(together, 2, "all is well") == [(5, [0, 10])] * 2


def test_what_one_rank_cannot_do_ends_all_of_them_with_its_sentence():
    assert run_ranks(together, 2, "one fails") == ["UserError: rank 1 cannot"] * 2


@pytest.mark.parametrize(
    ("case", "ends"),
    [
        ("a defect", ["UserError: rank 1 has ended with KeyError: 'missing'", "KeyError: 'missing'"]),
        ("a defect of the first", ["ValueError: odd", "UserError: rank 0 has ended with ValueError: odd"]),
    ],
)
def test_nobody_waits_for_a_rank_that_a_defect_has_ended(case: str, ends: list[str]):
    assert run_ranks(together, 2, case) == ends
