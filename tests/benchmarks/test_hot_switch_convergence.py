# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/hot_switch_convergence` at toy size: both sides train, and see about as many tokens."""

import json
from pathlib import Path

import pytest

from benchmarks import hot_switch_convergence as study_main
from benchmarks.convergence.settings import Run
from benchmarks.hot_switch_convergence import HOT, STOCK, HotSwitchStudy
from tests.benchmarks.reports import read_cases
from tests.support.corpus import make

TOY = {"num_layers": 2, "hidden_size": 16, "lr_warmup_iters": 0, "eval_iters": 1, "eval_global_batch_size": 48}


def test_the_report_compares_both_sides_and_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text("def f():\n    return 1\n" * 8 * (number + 1))
    study = HotSwitchStudy(output=tmp_path / "study", iterations=2, evaluation=1, overrides=TOY)
    make(texts, study.corpus)
    study_main.prepare_corpus(study)  # finds it made
    runs = [Run(method=method, seed=7) for method in (STOCK, HOT)]
    study_main.make_missing_of(study, runs, study_main.make)
    stock, hot = (json.loads(study.result(run).read_text()) for run in runs)
    assert stock["validation"].keys() == hot["validation"].keys() == {"1", "2"}
    # Of Megatron's index files, which are named after all that decides which rows there are.
    rows = [file.read_text() for file in (study.output / "index-cache").rglob("*description.txt")]
    assert sum('"index_split": "valid"' in text and str(study.corpus) in text for text in rows) == 1, rows
    assert stock["rounds"] == [] and len(hot["rounds"]) == len(hot["training"][0]) == 2
    study_main.report_on(study, runs, [7], tmp_path / "report.json")
    case, documents = read_cases(tmp_path / "report.json").values()
    assert documents["case"] == "hot_documents_loss_ratio"
    assert documents["value"] == pytest.approx(hot["documents"] / stock["documents"])
    # Weights that stay as they are have seen nothing of either kind of text yet.
    assert stock["documents"] == pytest.approx(stock["validation"]["2"], rel=0.1)
    assert (case["case"], case["goal"]) == ("hot_loss_ratio", 1.02)
    assert case["value"] == pytest.approx(hot["validation"]["2"] / stock["validation"]["2"])
    assert "at the end" in capsys.readouterr().out


def test_both_sides_keep_documents_apart_and_validate_on_the_same_rows(tmp_path: Path):
    study = HotSwitchStudy(output=tmp_path)
    for method in study.methods:
        words = study.arguments(Run(method=method, seed=1))
        assert {"--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"} <= set(words)
        assert method.options["eval_iters"] * rows_of_validation(method.options) == 144
        evaluations = int(arguments_after(words, "--train-iters")) // int(arguments_after(words, "--eval-interval"))
        assert evaluations == 3  # and one at the end


def rows_of_validation(options):
    return options.get("eval_global_batch_size", options["global_batch_size"])


def test_both_sides_train_as_many_tokens(tmp_path: Path):
    study = HotSwitchStudy(output=tmp_path)
    steps = [arguments_after(study.arguments(Run(method=method, seed=1)), "--train-iters") for method in (STOCK, HOT)]
    assert steps == ["200", "198"]


def arguments_after(words, flag):
    return words[words.index(flag) + 1]
