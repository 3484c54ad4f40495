# SPDX-License-Identifier: Apache-2.0
"""Ranks of a Megatron job with other options of local SGD are refused together, before groups are cut by them."""

import argparse
import functools
import os
import sys
from functools import partial

import pytest

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_failing_pretrain, run_pretrain


def on_rank(number, add=(), without_local_sgd=False):
    """Let one rank find other words on its command line, as on a node whose launch script is not the others'."""
    if int(os.environ["RANK"]) != number:
        return
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self, args=None, namespace=None):
        if args is None:
            args = [*sys.argv[1:], *add]
            if without_local_sgd:
                args.remove("--use-local-sgd")
                place = args.index("--local-sgd-workers")
                del args[place : place + 2]
        return original(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_known_args


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (["--local-sgd-sync-interval", "3"], "--local-sgd-sync-interval is 2 on ranks 0, 1 and 3 on rank 2;"),
        (["--outer-optimizer-lr", "0.5"], "--outer-optimizer-lr is 0.7 on ranks 0, 1 and 0.5 on rank 2;"),
        (["--local-sgd-codec", "bf16"], "--local-sgd-codec is not given on ranks 0, 1 and 'bf16' on rank 2;"),
        (["--local-sgd-fragments", "2"], "--local-sgd-fragments is 1 on ranks 0, 1 and 2 on rank 2;"),
        (["--local-sgd-pseudo-grad-reducer", "linear"], "-reducer is not given on ranks 0, 1 and 'linear' on rank 2;"),
    ],
    ids=["interval", "rate", "codec", "fragments", "reducer"],
)
def test_a_rank_with_another_option_is_refused_on_all_ranks_with_the_flag_and_both_values(add, said):
    run = arguments("single", "fp32", workers=3, local_sgd_sync_interval=2)
    exits = run_failing_pretrain(run, 3, before=partial(on_rank, 2, add), timeout=90)
    assert all(each.exit_code not in (0, None) for each in exits)
    # Once per job.
    assert sum(each.stderr.count("megatron-ext: error: arguments: ") for each in exits) == 1
    assert f"{said} start all ranks with the same command line" in "".join(each.stderr for each in exits)
    assert not any("Traceback" in each.stderr for each in exits)


def test_ranks_that_would_cut_other_groups_are_refused():
    run = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2, global_batch_size=8)
    other = ["--local-sgd-workers", "4"]
    exits = run_failing_pretrain(run, 4, before=partial(on_rank, 3, other), timeout=90)
    assert "--local-sgd-workers is 2 on ranks 0-2 and 4 on rank 3;" in "".join(each.stderr for each in exits)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_local_sgd_is_named_where_the_others_waited_for_it(silent):
    run = arguments("single", "fp32", workers=2, distributed_timeout_minutes=1)
    exits = run_failing_pretrain(run, 2, before=partial(on_rank, silent, without_local_sgd=True), timeout=170)
    said = f"rank {silent} did not say within 0:00:30 (half of --distributed-timeout-minutes) which options of local"
    assert said in "".join(each.stderr for each in exits)


def test_the_file_of_rounds_may_be_named_on_the_first_rank_alone(tmp_path):
    # All ranks have to measure what is written.
    file = tmp_path / "rounds.jsonl"
    run = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2, train_iters=4)
    run_pretrain(run, 2, before=partial(on_rank, 0, ["--local-sgd-round-log", str(file)]), timeout=90)
    assert [entry["cosine"] is None for entry in read_rounds(file)] == [True, False]
