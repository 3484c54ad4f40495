# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job do together."""

from megatron_ext.errors import UserError
from tests.support.distributed import run_ranks


def together(case: str) -> object:
    import torch.distributed as dist

    from megatron_ext.sync_service.job import Ranks

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Ranks(dist.group.WORLD)

    def function() -> int:
        if case == "one fails" and rank == 1:
            raise UserError("rank 1 cannot")
        return 10 * rank

    try:
        return job.on_first(lambda: rank + 5), job.on_all(function)
    except UserError as error:
        return str(error)


def test_the_first_speaks_for_all_and_all_know_what_each_has_done():
    assert run_ranks(together, 2, "all is well") == [(5, [0, 10])] * 2


def test_what_one_rank_cannot_do_ends_all_of_them_with_its_sentence():
    assert run_ranks(together, 2, "one fails") == ["rank 1 cannot"] * 2
