# SPDX-License-Identifier: Apache-2.0
"""The table of options and Megatron's parser: neither has an option that the other does not know of."""

import argparse
import dataclasses
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest

from megatron_ext.options import ROWS
from megatron_ext.options.default_rules import DEFAULT_RULES, rule_of
from megatron_ext.patching.gates import version_problem
from tests.support.distributed import run_ranks

newest = pytest.mark.skipif(
    version_problem("megatron-core", ">=0.19,<0.20") is not None,
    reason="the table is written for the release of constraints.txt; others have more or fewer options",
)

AREAS = {"checkpointing", "distributed init", "regularization", "learning rate and weight decay", "mixed precision"}
"""Groups of the parser whose options need a row or a rule by name, as do those of DDP and the optimizer."""


def what_megatron_has() -> dict[str, Any]:
    """Megatron's options by group, all flags of a run, and the fields of the model's config."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    from tests.support.parsers import full_parser

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    args = parser.parse_args([])
    configs = (DistributedDataParallelConfig, OptimizerConfig)
    named = {field.name for config in configs for field in dataclasses.fields(config)}
    return {
        "options": [
            (group.title, action.option_strings, group.title in AREAS or action.dest in named)
            for group in parser._action_groups
            for action in group._group_actions
        ],
        "flags": sorted(full_parser()._option_string_actions),
        "absent rows": [row.option for row in ROWS if not row.is_in(args)],
        "config": sorted(field.name for field in dataclasses.fields(TransformerConfig)),
    }


@pytest.fixture(scope="module")
def megatron() -> dict[str, Any]:
    """What Megatron's parser has, asked once."""
    (found,) = run_ranks(what_megatron_has, 1)
    assert len(found["options"]) > 700
    return found


def test_a_row_is_of_a_release_exactly_if_its_parser_has_the_option(megatron: dict[str, Any]):
    own = {flag for _, flags, _ in megatron["options"] for flag in flags}
    assert [row.option for row in ROWS if not own.issuperset(row.flags)] == megatron["absent rows"]


@newest
def test_every_option_that_the_table_names_is_one_of_megatrons(megatron: dict[str, Any]):
    assert megatron["absent rows"] == []
    said = {
        (row.option, flag)
        for row in ROWS
        for verdict in row.verdicts.values()
        for text in (row.option, *(each.way_out for each in (verdict, *verdict.exceptions.values())))
        for flag in re.findall(r"--[a-zA-Z0-9_-]*[a-zA-Z0-9]", text)
    }
    assert {each for each in said if each[1] not in megatron["flags"]} == set()


def test_every_field_of_a_models_config_that_the_table_names_is_one(megatron: dict[str, Any]):
    paths = {path for row in ROWS for path in row.in_config}
    assert len(paths) > 15
    fields = {path.removeprefix("transformer.") for path in paths if path.startswith("transformer.")}
    assert fields <= set(megatron["config"])
    assert {path for path in paths if not path.startswith("transformer.")} == {"position_embedding_type"}


@newest
def test_every_option_of_megatron_has_a_row_or_a_rule(megatron: dict[str, Any]):
    with_rows = {flag for row in ROWS for flag in row.flags}
    without, used = [], set()
    for group, flags, is_close in megatron["options"]:
        if with_rows.intersection(flags):
            continue
        rule = rule_of(flags[0], group)
        if rule is None or (is_close and not rule.patterns):
            without.append((group, flags[0]))
        else:
            used.add(rule)
    assert without == []
    assert used == set(DEFAULT_RULES)


@newest
def test_no_rule_is_for_options_that_do_not_exist_or_have_rows(megatron: dict[str, Any]):
    with_rows = {flag for row in ROWS for flag in row.flags}
    left = [(group, flags[0]) for group, flags, _ in megatron["options"] if not with_rows.intersection(flags)]
    for rule in DEFAULT_RULES:
        for pattern in rule.patterns:
            assert any(fnmatchcase(flag, pattern) for _, flag in left), pattern
        assert set(rule.groups) <= {group for group, _ in left}
