# SPDX-License-Identifier: Apache-2.0
"""The file of rounds survives kills and resumes."""

import json
import math

import pytest

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.reporting.round_log import FILE_NAME, append_round, as_number, read_rounds


def entry(number, **more):
    return {"round": number, "iteration": 10 * number, **more}


def numbers(path):
    return [found["round"] for found in read_rounds(path)]


def test_rounds_come_back_in_order_from_the_file_and_from_its_folder(tmp_path):
    file = tmp_path / "run" / FILE_NAME
    for number in (1, 2, 3):
        append_round(file, entry(number))
    assert numbers(file) == numbers(file.parent) == [1, 2, 3]


def test_a_resume_replaces_the_rounds_that_it_makes_again(tmp_path):
    file = tmp_path / FILE_NAME
    for number, attempt in ((1, "a"), (2, "a"), (3, "a"), (4, "a"), (3, "b")):
        append_round(file, entry(number, attempt=attempt))
    assert [(found["round"], found["attempt"]) for found in read_rounds(file)] == [(1, "a"), (2, "a"), (3, "b")]


def test_half_a_line_of_a_killed_run_costs_that_line_only(tmp_path):
    file = tmp_path / FILE_NAME
    append_round(file, entry(1))
    with file.open("a") as opened:
        opened.write('{"round": 2, "iter')
    assert numbers(file) == [1]
    append_round(file, entry(2))
    assert numbers(file) == [1, 2]


def test_what_is_non_finite_is_null_as_json_demands(tmp_path):
    file = tmp_path / FILE_NAME
    append_round(file, entry(1, norms=[1.0, float("nan")], by_unit={"layer": float("inf")}))

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(file.read_text(), parse_constant=refuse)
    assert (found["norms"], found["by_unit"]) == ([1.0, None], {"layer": None})
    assert math.isnan(as_number(found["norms"][1]))


@pytest.mark.parametrize("content", ["", "hello\n", "[1, 2]\n", "{}\n"])
def test_a_file_without_rounds_is_refused_by_its_name(tmp_path, content):
    file = tmp_path / FILE_NAME
    file.write_text(content)
    with pytest.raises(UserError, match=FILE_NAME):
        read_rounds(tmp_path)


def test_a_missing_file_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UserError, match="--save folder"):
        read_rounds(tmp_path)
