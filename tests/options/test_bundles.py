# SPDX-License-Identifier: Apache-2.0
"""Bundles of options: the rows that name a test of them are those whose options the bundles ask for."""


import pytest

from megatron_ext.options import ROWS, OptionVerdict
from megatron_ext.options.common_verdicts import BUNDLE, PEERS_BUNDLE
from tests.support.distributed import run_ranks
from tests.support.option_bundles import LAID_OUT, MODELS, SAVED, SPREAD, WITH_FILES, options_with_files
from tests.support.presets import LAYOUTS, PRECISIONS, Options, toy_gpt


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
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every row that a bundle asks for, of bundles that a worker of local SGD trains with, and that a peer does."""
    shared: list[Options] = [*MODELS.values()]
    shared += [{**LAYOUTS[layout].options, **options} for layout, options in LAID_OUT.values()]
    shared += [options_with_files(name, tmp_path_factory.mktemp("files")) for name in WITH_FILES]
    of_peers = [{**LAYOUTS[layout].options, **options} for layout, _, options in SPREAD.values()]
    of_peers += [{**saving, "save": "folder"} for saving, _ in SAVED.values()]
    of_peers += [{**reading, "load": "folder"} for _, reading in SAVED.values()]
    (found,) = run_ranks(rows_asked_for, 1, [toy_gpt(PRECISIONS["bf16-distopt"], each) for each in shared + of_peers])
    return {BUNDLE.tested_by: set.union(*found[: len(shared)]), PEERS_BUNDLE.tested_by: set.union(*found)}


@pytest.mark.parametrize(("feature", "test"), [("local-sgd", BUNDLE), ("sync-service", PEERS_BUNDLE)])
def test_every_row_that_names_a_test_of_bundles_is_asked_for_by_one(
    asked: dict[str, set[str]], feature: str, test: OptionVerdict
):
    named = {row.option for row in ROWS if row.verdicts[feature].tested_by == test.tested_by}
    assert len(named) > 60
    assert named - asked[test.tested_by] == set()
