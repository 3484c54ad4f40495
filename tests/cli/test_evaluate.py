# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext evaluate` as people call it."""

import json
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from tests.convert import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a corpus of bytes."""
    found = tmp_path_factory.mktemp("evaluate")
    models.save("llama", found / "model")
    (found / "text.txt").write_text("a few words of plain text, one after the other\n" * 4)
    (found / "more.txt").write_text("some more of them\n" * 9)
    inputs = [str(found / "text.txt"), str(found / "more.txt")]
    assert main(["data", "prepare", *inputs, "--output-prefix", str(found / "corpus")]) == 0
    return found


def test_perplexity_is_printed_written_and_drawn_beside_a_baseline(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["evaluate", str(folder / "model"), "--data", str(folder / "corpus"), "--split", "1,1,0"]
    # The end of a document is 256, which the model's 250 rows do not have; none is among the first tokens.
    words += ["--part", "training", "--sequence-length", "32", "--max-tokens", "100", "--device", "cpu"]
    assert main([*words, "--name", "first", "--output", str(folder / "first.json")]) == 0
    capsys.readouterr()
    compared = ["--baseline", str(folder / "first.json"), "--picture", str(folder / "bars.png")]
    assert main([*words, *compared]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["measure", "first", "model"] and row.split()[0] == "perplexity"
    assert row.split()[1] == row.split()[2]
    written = json.loads((folder / "first.json").read_text())["perplexity"]
    assert (written["tokens"], written["part"], written["sequence_length"]) == (100, "training", 32)
    assert f"{written['perplexity']:.4f}" == row.split()[1]
    assert (folder / "bars.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model"], "give --data PREFIX, --tasks NAMES, or both"),
        (["nowhere", "--data", "corpus"], "nowhere: not a Hugging Face model"),
        (["model", "--data", "nothing"], "--data nothing: no nothing.bin"),
        (["model", "--data", "corpus", "--split", "1,1,0"], "has the id 256, and the model's vocabulary 250 rows"),
        (["model", "--tasks", "sciq:many"], "--tasks sciq:many: give NAME or NAME:SHOTS"),
        (["model", "--data", "corpus", "--device", "toaster"], "--device toaster: torch knows no such device"),
        (["model", "--data", "corpus", "--device", "cuda:99"], "--device cuda:99: torch cannot compute on it here"),
        (["model", "--data", "corpus", "--device", "meta"], "--device meta: torch cannot compute on it here"),
        (["model", "--data", "corpus", "--baseline", "none.json"], "--baseline none.json: No such file"),
        (["model", "--data", "nothing", "--picture", "bars.txt"], "--picture bars.txt: give a name that ends in .png"),
        (["model", "--data", "nothing", "--output", "text.txt"], "--output text.txt: is there already, and no eval"),
        (["model", "--data", "nothing", "--dtype", "foo"], "argument --dtype: invalid choice: 'foo'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    try:
        status = main(["evaluate", *words])
    except SystemExit as ended:  # by argparse
        status = int(ended.code or 0)
    assert status == 2 and said in capsys.readouterr().err


def test_a_missing_harness_is_told_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(folder / "model"), "--data", "nothing", "--tasks", "sciq"]) == 2
    assert "--tasks needs lm-evaluation-harness" in capsys.readouterr().err


def test_a_sequence_beyond_the_models_positions_is_told(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["evaluate", str(folder / "model"), "--data", str(folder / "corpus"), "--split", "1,1,0", "--device", "cpu"]
    for length in ("128", "129"):
        assert main([*words, "--part", "training", "--max-tokens", "50", "--sequence-length", length]) == 0
        told = "--sequence-length 129 is beyond the 128 positions" in capsys.readouterr().err
        assert told == (length == "129")
