# SPDX-License-Identifier: Apache-2.0
"""Strategies in YAML files."""

import sys
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.hot_switch import PRESETS, Bucket, Strategy, read_strategy_file

GOOD = """\
bucket_sizes: [16384, 4096, 0]
strategies:
  - {dp: 1, tp: 4, pp: 2, vpp: 2, sequence_parallel: true, recompute: selective}
  - dp: 4
    tp: 1
    pp: 1
    cp: 2
    micro_batch_size: 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "strategies.yaml"


def test_a_file_says_the_same_as_the_fields_of_a_strategy(file: Path) -> None:
    file.write_text(GOOD)
    chosen = read_strategy_file(file, world_size=8, seq_length=16384, shape=PRESETS["llama-7b"])
    assert chosen.strategies == (
        Strategy(dp=1, tp=4, pp=2, vpp=2, sequence_parallel=True, recompute="selective"),
        Strategy(dp=4, tp=1, pp=1, cp=2, micro_batch_size=2),
    )
    assert chosen.buckets == (Bucket(above=4096, up_to=16384), Bucket(above=0, up_to=4096))


def test_a_file_lists_the_layers_of_chunks(file: Path) -> None:
    file.write_text("strategies: [{dp: 1, tp: 1, pp: 2, stage_layers: [15, 17], micro_batch_group: 4}]")
    home = read_strategy_file(file, shape=PRESETS["llama-7b"]).home
    assert home == Strategy(dp=1, tp=1, pp=2, stage_layers=(15, 17), micro_batch_group=4)


def test_buckets_may_be_left_out(file: Path) -> None:
    file.write_text("strategies: [{dp: 2, tp: 1, pp: 1}]")
    assert read_strategy_file(file).buckets == ()


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("strategies: [{dp: 2, tp: 1}]", ["strategy 1: pp is missing; give it"]),
        (
            "strategies: [{dp: 2, tp: 1, pp: 1, zp: 2}]",
            ["strategy 1: 'zp' is not a field of a strategy; use dp, tp, pp"],
        ),
        ("strategies: [{dp: 2, tp: true, pp: 1}]", ["strategy 1: tp is True; it must be a whole number"]),
        ("strategies: [{dp: 2, tp: 1, pp: '1'}]", ["strategy 1: pp is '1'; it must be a whole number"]),
        (
            "strategies: [{dp: 2, tp: 1, pp: 1, sequence_parallel: 1}]",
            ["sequence_parallel is 1; it must be true or false"],
        ),
        (
            "strategies: [{dp: 2, tp: 1, pp: 1, stage_layers: [1, true]}]",
            ["strategy 1: stage_layers is [1, True]; it must be a list of whole numbers"],
        ),
        ("strategies: ['1,4,2']", ["strategy 1: '1,4,2' is not a mapping; write it as {dp: 1, tp: 4, pp: 2}"]),
        ("strategies: [{dp: 2, tp: 1, pp: 1}]\nbuckets: [4, 0]", ["'buckets' is not known; use 'strategies' and"]),
        ("strategies: [{dp: 2, tp: 1, pp: 1}]\nbucket_sizes: 4", ["bucket_sizes must be a list of whole numbers"]),
        ("[1, 2]", ["there is no list 'strategies'"]),
        ("", ["there is no list 'strategies'"]),
        ("strategies: {dp: 2}", ["there is no list 'strategies'"]),
        ("strategies: []", ["there is no strategy; give at least one"]),
        ("strategies: [", ["not valid YAML"]),
        (
            "strategies: [{dp: 2, tp: x, pp: 1}, {dp: 0, tp: 1, pp: 1}]\nbucket_sizes: [4, 5]",
            [
                "5 problems",
                "tp is 'x'",
                "dp is 0",
                "2 strategies need 3",
                "do not descend",
                "the last bucket size is 5",
            ],
        ),
    ],
)
def test_a_wrong_file_is_refused_with_all_that_is_wrong(file: Path, text: str, complaints: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_strategy_file(file)
    for complaint in complaints:
        assert complaint in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read: No such file"):
        read_strategy_file(tmp_path / "none.yaml")


def test_without_pyyaml_the_error_says_how_to_get_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(GOOD)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UserError, match=r"pip install 'PyYAML>=6'"):
        read_strategy_file(file)
