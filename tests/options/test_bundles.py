# SPDX-License-Identifier: Apache-2.0
"""Bundles of options: the rows that name a test of them are those whose options the bundles ask for."""

from pathlib import Path

import pytest

from megatron_ext.options import ROWS
from megatron_ext.options.common_verdicts import BUNDLE
from tests.support.distributed import run_ranks
from tests.support.option_bundles import LAID_OUT, MODELS, WITH_FILES, options_with_files
from tests.support.presets import LAYOUTS, Options, toy_gpt


def rows_asked_for(lines: list[list[str]]) -> list[set[str]]:
    """Return for each command line the rows that it asks for and whose flag it names."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found = []
    for line in lines:
        args = parser.parse_args(line)
        asked = {row.option for row in ROWS if row.is_in(args) and row.asked(args)}
        found.append({row.option for row in ROWS if row.option in asked and not set(row.flags).isdisjoint(line)})
    return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every row that a bundle asks for."""
    bundles: list[Options] = [*MODELS.values()]
    bundles += [{**LAYOUTS[layout].options, **options} for layout, options in LAID_OUT.values()]
    bundles += [options_with_files(name, folder_of(tmp_path_factory)) for name in WITH_FILES]
    (found,) = run_ranks(rows_asked_for, 1, [toy_gpt(bundle) for bundle in bundles])
    return set.union(*found)


def folder_of(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("files")


def test_every_row_that_names_the_test_of_the_bundles_is_asked_for_by_one(asked: set[str]):
    named = {row.option for row in ROWS if row.verdicts["local-sgd"].tested_by == BUNDLE.tested_by}
    assert len(named) > 60
    assert named - asked == set()
