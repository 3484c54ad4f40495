# SPDX-License-Identifier: Apache-2.0
"""YAML as users write it: with merges, but with no key twice."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.yaml_file import read_yaml

BASE = "base: &base {a: 1}\n"


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return read_yaml(path)


@pytest.mark.parametrize(
    "text",
    [
        "end: {<<: {<<: *base, a: 2}, c: 3}",
        "middle: &middle {<<: *base, a: 2}\nend: {<<: *middle, c: 3}",
        "deep: {deeper: {middle: &middle {<<: *base, a: 2}}}\nend: {<<: *middle, c: 3}",
        "end: {<<: [{c: 3}, *base], a: 2}",
    ],
)
def test_a_key_may_take_the_place_of_one_that_is_merged(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, BASE + text)["end"] == {"a": 2, "c": 3}


@pytest.mark.parametrize(
    "text",
    [
        "end: {a: 1, a: 2}",
        "end: {<<: *base, b: 1, b: 2}",
        "end: {<<: {b: 1, b: 2}, c: 3}",
        "deep: {middle: &middle {b: 1, b: 2}}\nend: {<<: *middle}",
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"the key '[ab]' is there twice; drop one of them"):
        read(tmp_path, BASE + text)
