# SPDX-License-Identifier: Apache-2.0
"""Options that a release of Megatron has and the table does not know are refused where they are given."""

from functools import partial

import pytest

from tests.local_sgd.runs import arguments
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain


def with_an_option(group):
    """Let Megatron's parser have an option more, in one of its groups."""
    from megatron.training import arguments

    original = arguments._add_checkpointing_args

    def add(parser):
        parser = original(parser)
        (found,) = (each for each in parser._action_groups if each.title == group)
        found.add_argument("--brand-new-option", type=int, default=3)
        return parser

    arguments._add_checkpointing_args = add


NEW = partial(with_an_option, "checkpointing")


@pytest.mark.parametrize("workers", [1, None], ids=["local SGD", "CPU alone"])
def test_an_option_that_the_table_does_not_know_is_refused_by_name_if_it_is_given(workers):
    run = arguments("single", "fp32", workers=workers, train_iters=1)
    (said,) = run_failing_pretrain([*run, "--brand-new-option", "4"], 1, before=NEW)
    assert "Traceback" not in said.stderr
    assert "arguments: --brand-new-option is an option of this release of Megatron" in said.stderr
    run_pretrain(run, 1, before=NEW)


def test_a_group_that_a_rule_is_for_may_have_more_options():
    new = partial(with_an_option, "regularization")
    (said,) = run_failing_pretrain(toy_gpt({"train_iters": 1, "brand_new_option": 4}), 1, before=new)
    assert "--brand-new-option is an option of this release" in said.stderr
    run_pretrain(toy_gpt({"train_iters": 1, "brand_new_option": 4}), 1, before=partial(with_an_option, "training"))
