# SPDX-License-Identifier: Apache-2.0
"""What people who come from atorch call by its old name works, or says what is missing."""

import sys

from tests.support.distributed import run_ranks

FLAGS = ["--use-local-sgd", "--local-sgd-workers", "2", "--local-sgd-sync-interval", "32"]


def parsed(patched):
    """Return what Megatron's parser makes of atorch's way of asking for local SGD."""
    from megatron.training.arguments import parse_args

    from megatron_ext.local_sgd import local_sgd_args_provider, patch_megatron_for_local_sgd

    if patched:
        patch_megatron_for_local_sgd()
    sys.argv = ["pretrain_gpt.py", *FLAGS, "--outer-optimizer-lr", "0.5"]
    args = parse_args(extra_args_provider=local_sgd_args_provider)
    return args.use_local_sgd, args.local_sgd_sync_interval, args.outer_optimizer_lr


def test_patches_and_argument_provider_work_together():
    assert run_ranks(parsed, 1, True) == [(True, 32, 0.5)]


def test_a_provider_without_patches_is_refused_with_the_way_out():
    (rank,) = run_ranks(parsed, 1, False, expect_failure=True)
    assert "call patch_megatron_for_local_sgd() before" in rank.stderr
