# SPDX-License-Identifier: Apache-2.0
"""What people who come from atorch call by its old name works, or says what is missing."""

import sys

import pytest

from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig
from tests.local_sgd.runs import local_run, same_state
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


OUTER = ["--outer-optim-class", "torch.optim.SGD", "--outer-optim-kwargs"]


def parsed_outer_optimizer(kwargs):
    """Return what the command line makes of the outer optimizer's class and its arguments."""
    from megatron.training.arguments import parse_args

    from megatron_ext import patch_megatron
    from megatron_ext.local_sgd import OuterOptimizerConfig
    from megatron_ext.local_sgd.arguments import notices

    patch_megatron()
    sys.argv = ["pretrain_gpt.py", *FLAGS, *OUTER, kwargs]
    args = parse_args()
    config = OuterOptimizerConfig.from_args(args)
    return config.outer_optim_class, config.outer_optim_kwargs, config.problems(), notices(args)[1:]


def test_the_outer_optimizer_s_class_and_arguments_have_flags():
    expected = ("torch.optim.SGD", {"lr": 0.7, "nesterov": True}, [], [])
    assert run_ranks(parsed_outer_optimizer, 1, '{"lr": 0.7, "nesterov": true}') == [expected]


def test_who_gives_no_learning_rate_is_told_whose_holds():
    ((_, _, problems, (said,)),) = run_ranks(parsed_outer_optimizer, 1, '{"momentum": 0.9}')
    assert problems == []
    assert "--outer-optim-kwargs has no lr, so the default of torch.optim.SGD holds" in said


def said_of(*options):
    """Return what a command line with more options is told besides what was chosen."""
    from megatron.training.arguments import parse_args

    from megatron_ext import patch_megatron
    from megatron_ext.local_sgd.arguments import notices

    patch_megatron()
    sys.argv = ["pretrain_gpt.py", *FLAGS, *options]
    return notices(parse_args())[1:]


def test_the_readme_s_gta_without_more_is_said_to_be_the_weighted_mean():
    reducer = ["--local-sgd-pseudo-grad-reducer", "gta"]
    ((said,),) = run_ranks(said_of, 1, *reducer)
    assert "--local-sgd-pseudo-grad-reducer gta is the weighted mean without" in said
    assert run_ranks(said_of, 1, *reducer, "--local-sgd-pseudo-grad-consensus", "sum") == [[]]


def test_who_averaged_by_default_is_told_that_the_default_is_diloco_s():
    ((said,),) = run_ranks(first_said_of, 1)
    assert "outer optimizer sgd (DiLoCo's default: lr 0.7, momentum 0.9, Nesterov; --outer-optimizer none" in said
    ((said,),) = run_ranks(first_said_of, 1, "--outer-optimizer", "none")
    assert "outer optimizer none," in said


def first_said_of(*options):
    """Return what a command line is told was chosen."""
    from megatron.training.arguments import parse_args

    from megatron_ext import patch_megatron
    from megatron_ext.local_sgd.arguments import notices

    patch_megatron()
    sys.argv = ["pretrain_gpt.py", *FLAGS, *options]
    return notices(parse_args())[:1]


def test_the_modules_have_atorch_s_names():
    from megatron_ext.local_sgd import DDP, megatron, patch_megatron_for_local_sgd, plain_torch

    assert DDP.OuterOptimPeriodicModelAverager is plain_torch.OuterOptimPeriodicModelAverager
    assert DDP.StatefulPostLocalSGDOptimizer is plain_torch.StatefulPostLocalSGDOptimizer
    assert megatron.patch_megatron_for_local_sgd is patch_megatron_for_local_sgd


def test_atorch_s_defaults_of_what_changes_nothing_are_taken():
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, is_debug=True, gradient_accumulation_steps=4)
    gta = GTAConfig(reducer="gta", sparsification_method="magnitude", density=1.0)
    assert config.problems() == gta.problems(config) == []


def test_sparsification_at_density_1_keeps_everything():
    gta = {"local_sgd_sync_interval": 2, "local_sgd_pseudo_grad_reducer": "gta", "local_sgd_is_debug": True}
    dense = local_run("single", "fp32", workers=2, **gta)
    kept = local_run("single", "fp32", workers=2, **gta, local_sgd_pseudo_grad_sparsification="magnitude")
    assert same_state(dense, kept)
    assert "--local-sgd-pseudo-grad-sparsification keeps everything at" in kept[0].stdout


@pytest.mark.parametrize("given", ["{lr: 0.7}", "[0.7]", '{"lr": NaN}'])
def test_arguments_that_are_no_json_object_are_refused_with_an_example(given):
    (rank,) = run_ranks(parsed_outer_optimizer, 1, given, expect_failure=True)
    assert rank.exit_code == 2
    assert f"--outer-optim-kwargs: '{given}' is not" in rank.stderr
    assert '{"lr": 0.7, "momentum": 0.9}' in rank.stderr


def test_a_provider_without_patches_is_refused_with_the_way_out():
    (rank,) = run_ranks(parsed, 1, False, expect_failure=True)
    assert "call patch_megatron_for_local_sgd() before" in rank.stderr
