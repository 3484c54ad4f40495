# SPDX-License-Identifier: Apache-2.0
"""Results are kept whole, and set side by side."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.evaluation.outputs import check_outputs
from megatron_ext.evaluation.results import Results, draw, read_results, table

DENSE = Results(
    name="dense",
    model="models/dense",
    perplexity={"data": "corpus", "part": "test", "tokens": 100, "loss": 2.0, "perplexity": 7.389},
    tasks={"sciq": {"acc": 0.5, "acc_stderr": 0.1}, "hellaswag": {"acc": 0.25, "acc_norm": 0.3}},
)
MIXTURE = Results(name="a longer name", model="models/mixture", tasks={"sciq": {"acc": 0.625}})


def test_what_is_written_is_what_is_read(tmp_path: Path):
    DENSE.write(tmp_path / "folder" / "dense.json")
    assert read_results(tmp_path / "folder" / "dense.json") == DENSE


def test_the_table_has_a_row_for_each_measure_and_a_column_for_each_model():
    assert list(table([DENSE, MIXTURE])) == [
        "measure                   dense  a longer name",
        "perplexity               7.3890              -",
        "sciq (acc)               0.5000         0.6250",
        "hellaswag (acc_norm)     0.3000              -",
    ]


def test_what_is_of_other_data_or_of_other_questions_is_not_set_side_by_side():
    base = {**DENSE.perplexity, "sequence_length": 64}
    one = Results(name="one", model="", perplexity=base, tasks={"sciq": {"acc": 0.5, "shots": 0.0, "questions": 16.0}})
    other = replace(one, name="two", perplexity={**base, "data": "elsewhere/corpus", "sequence_length": 128})
    assert cells([one, other]) == [
        ["measure", "one", "two"],
        ["perplexity: corpus, part test, sequence length 64, tokens 100", "7.3890", "-"],
        ["perplexity: corpus, part test, sequence length 128, tokens 100", "-", "7.3890"],
        ["sciq (acc)", "0.5000", "0.5000"],
    ]
    moved = replace(one, name="two", perplexity={**base, "data": "elsewhere/corpus"})
    few = replace(moved, tasks={"sciq": {"acc": 0.25, "shots": 5.0, "questions": 16.0}, "piqa": {"acc": 1.0}})
    assert cells([one, few])[1:] == [
        ["perplexity", "7.3890", "7.3890"],
        ["sciq (acc): shots 0, questions 16", "0.5000", "-"],
        ["sciq (acc): shots 5, questions 16", "-", "0.2500"],
        ["piqa (acc)", "-", "1.0000"],
    ]
    # Of figures from elsewhere nobody knows it; they stand beside others while these are all of the same.
    assert ["sciq (acc)", "0.5000", "0.5000"] in cells([DENSE, one])
    assert ["sciq (acc): not told of what", "0.5000", "-", "-"] in cells([DENSE, one, few])


def cells(models: list[Results]) -> list[list[str]]:
    return [re.split(" {2,}", line) for line in table(models)]


def test_the_picture_has_a_bar_for_each_model(tmp_path: Path):
    draw([DENSE, MIXTURE], tmp_path / "new" / "bars.svg")
    picture = (tmp_path / "new" / "bars.svg").read_text()
    for text in ("dense", "a longer name", "sciq (acc)", "perplexity (lower is better)"):
        assert f"<!-- {text} -->" in picture
    draw([MIXTURE], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be drawn"):
        draw([DENSE], tmp_path / "bars.nothing")


@pytest.mark.parametrize("name", ["results.json", "bars.png", "bars.svg"])
def test_an_evaluation_replaces_what_one_wrote_and_nothing_else(name: str, tmp_path: Path):
    file = tmp_path / name

    def check() -> None:
        check_outputs(*((file, None) if name.endswith("json") else (None, file)), [])

    check()
    if name.endswith("json"):
        DENSE.write(file)
    else:
        draw([DENSE], file)
    check()
    for mine in ("my thesis", '{"perplexity": 3}'):
        file.write_text(mine)
        with pytest.raises(UserError, match=f"{name}: is there already, and no evaluation wrote it; choose another"):
            check()


def test_where_nothing_can_be_written_is_told_before_the_evaluation(tmp_path: Path):
    (tmp_path / "file").write_text("")
    DENSE.write(tmp_path / "dense.json")
    for output, picture, baselines, said in [
        (tmp_path / "file" / "out.json", None, [], "--output .*file takes no files"),
        (tmp_path, None, [], "no evaluation wrote it"),
        (tmp_path / "dense.json", None, [tmp_path / "x" / ".." / "dense.json"], "is a --baseline as well"),
        (None, tmp_path / "bars.txt", [], r"--picture .*bars.txt: give a name that ends in .png or .svg"),
    ]:
        with pytest.raises(UserError, match=said):
            check_outputs(output, picture, baselines)


def test_no_file_has_a_number_that_json_does_not_know(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Results(name="x", model="x", perplexity={"perplexity": math.nan}).write(tmp_path / "x.json")


def test_a_baseline_that_is_another_file_is_refused(tmp_path: Path):
    (tmp_path / "other.json").write_text('{"loss": 2.0}')
    with pytest.raises(UserError, match="not what `megatron-ext evaluate --output` writes"):
        read_results(tmp_path / "other.json")
    with pytest.raises(UserError, match="No such file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"architectures": []}', "it has no field 'model'"),
        ('{"name": "", "model": "", "tasks": {}, "perplexity": {}, "loss": 2}', "it has a field 'loss'"),
        ('{"name": "", "model": "", "tasks": {}, "perplexity": {"loss": 2}}', "its field 'perplexity' has none"),
        ('{"name": "", "model": "", "tasks": {"sciq": 0.5}, "perplexity": {}}', "its field 'tasks' has something"),
        ("[]", "it has no object"),
        ("{", "it is not JSON"),
    ],
)
def test_what_a_foreign_baseline_lacks_is_told(content: str, said: str, tmp_path: Path):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match=f"--output` writes: {said}"):
        read_results(tmp_path / "other.json")
