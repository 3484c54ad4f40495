# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/hot_switch_convergence` at toy size: all methods train, and see about as many tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convergence.settings import Run
from benchmarks.hot_switch_convergence import __main__ as study_main
from benchmarks.hot_switch_convergence.settings import CONTEXT, HOT, PADDED, STOCK, HotSwitchStudy
from megatron_ext.hot_switch.data.padded_corpus import whole_rows
from tests.benchmarks.reports import read_cases
from tests.support.corpus import make

TOY = {"num_layers": 2, "hidden_size": 16, "lr_warmup_iters": 0, "eval_iters": 1, "eval_global_batch_size": 48}


@pytest.mark.slow
def test_the_report_compares_hot_switching_with_packed_and_padded_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text("def f():\n    return 1\n" * 8 * (number + 1))
    study = HotSwitchStudy(output=tmp_path / "study", iterations=2, evaluation=1, overrides=TOY)
    make(texts, study.corpus)
    study_main.prepare_corpus(study)  # finds it made
    runs = [Run(method=method, seed=7) for method in (STOCK, PADDED, HOT)]
    study_main.make_missing_of(study, runs, study_main.make)
    stock, padded, hot = (json.loads(study.result(run).read_text()) for run in runs)
    assert stock["validation"].keys() == padded["validation"].keys() == hot["validation"].keys() == {"1", "2"}
    # Of Megatron's index files, which are named after all that decides which rows there are.
    packed_rows, held_out_rows = (rows_validated(study, prefix) for prefix in (study.corpus, study.validation))
    for mine, theirs in zip(packed_rows, held_out_rows, strict=True):
        assert np.array_equal(mine - mine.min(axis=0), theirs - theirs.min(axis=0))
    assert stock["rounds"] == padded["rounds"] == [] and len(hot["rounds"]) == len(hot["training"][0]) == 2
    # The same weights, whose gradients the one takes of 25 documents, the other of 25 others.
    assert padded["training"][0][0] == pytest.approx(hot["training"][0][0], rel=0.01)
    study_main.report_on(study, runs, [7], tmp_path / "report.json")
    cases = read_cases(tmp_path / "report.json")
    for name, other in (("stock", stock), ("padded", padded)):
        rows, documents = cases[f"hot_over_{name}_loss"], cases[f"hot_over_{name}_documents_loss"]
        assert rows["goal"] == documents["goal"] == 1.02
        assert rows["value"] == pytest.approx(hot["validation"]["2"] / other["validation"]["2"])
        assert documents["value"] == pytest.approx(hot["documents"] / other["documents"])
    # Weights that stay as they are have seen nothing of either kind of text yet.
    assert stock["documents"] == pytest.approx(stock["validation"]["2"], rel=0.1)
    assert "at the end" in capsys.readouterr().out


def rows_validated(study, prefix):
    """Return the arrays of the only index that Megatron has made of the rows of a file for validation."""
    found = [
        file
        for file in (study.output / "index-cache").rglob("*-valid-description.txt")
        if f'"{prefix}"' in file.read_text()
    ]
    assert len(found) == 1, found
    stem = str(found[0]).removesuffix("description.txt")
    return [np.load(f"{stem}{array}_index.npy") for array in ("document", "sample", "shuffle")]


def test_padded_rows_have_a_document_or_a_piece_as_hot_switching_has_it():
    document = np.arange(1, 2 * CONTEXT + 11)
    rows = whole_rows(document, CONTEXT).reshape(-1, CONTEXT)
    assert len(rows) == 3
    assert np.array_equal(rows[0], document[:CONTEXT]) and np.array_equal(rows[1], document[CONTEXT : 2 * CONTEXT])
    assert np.array_equal(rows[2, :10], document[2 * CONTEXT :]) and (rows[2, 10:] == document[-1]).all()
    assert np.array_equal(whole_rows(document[:CONTEXT], CONTEXT), document[:CONTEXT])


def test_all_methods_keep_documents_apart_and_validate_on_as_many_rows(tmp_path: Path):
    study = HotSwitchStudy(output=tmp_path)
    for method in study.methods:
        words = study.arguments(Run(method=method, seed=1))
        assert {"--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"} <= set(words)
        assert method.options["eval_iters"] * rows_of_validation(method.options) == 144
        evaluations = int(arguments_after(words, "--train-iters")) // int(arguments_after(words, "--eval-interval"))
        assert evaluations == 3  # and one at the end


def rows_of_validation(options):
    return options.get("eval_global_batch_size", options["global_batch_size"])


def test_all_methods_train_as_many_tokens(tmp_path: Path):
    study = HotSwitchStudy(output=tmp_path)
    steps = [arguments_after(study.arguments(Run(method=method, seed=1)), "--train-iters") for method in study.methods]
    assert steps == ["200", "198", "198"]


def arguments_after(words, flag):
    return words[words.index(flag) + 1]
