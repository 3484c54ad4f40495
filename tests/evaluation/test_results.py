# SPDX-License-Identifier: Apache-2.0
"""Results are kept whole, and set side by side."""

from pathlib import Path

import pytest

from megatron_ext.errors import UserError
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


def test_the_picture_has_a_bar_for_each_model(tmp_path: Path):
    draw([DENSE, MIXTURE], tmp_path / "new" / "bars.svg")
    picture = (tmp_path / "new" / "bars.svg").read_text()
    for text in ("dense", "a longer name", "sciq (acc)", "perplexity (lower is better)"):
        assert f"<!-- {text} -->" in picture
    draw([MIXTURE], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be drawn"):
        draw([DENSE], tmp_path / "bars.nothing")


def test_a_baseline_that_is_another_file_is_refused(tmp_path: Path):
    (tmp_path / "other.json").write_text('{"loss": 2.0}')
    with pytest.raises(UserError, match="not what `megatron-ext evaluate --output` writes"):
        read_results(tmp_path / "other.json")
    with pytest.raises(UserError, match="No such file"):
        read_results(tmp_path / "none.json")
