# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext evaluate` as people call it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.cli.main import main
from tests.convert import models
from tests.evaluation.models import with_tokenizer


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
        (["model", "--data", "nothing"], "--data nothing: there is no nothing.bin"),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lacks", "its files lack model.layers.1.mlp.up_proj.weight; copy or convert the model again"),
        ("has more", "the model does not take model.layers.1.mlp.bias, "),
        ("is larger", "of another shape is model.norm.weight"),
    ],
)
def test_a_model_whose_files_have_other_weights_is_not_measured(
    change: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = models.save("llama", tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    if change == "lacks":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif change == "has more":
        weights |= {f"model.layers.{layer}.mlp.bias": torch.zeros(2) for layer in (1, 2, 3, 4)}
    else:
        weights["model.norm.weight"] = torch.ones(2 * weights["model.norm.weight"].numel())
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["evaluate", str(other), "--data", str(folder / "corpus"), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1] and not captured.out


def test_a_corpus_of_another_tokenizer_than_the_models_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = with_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8\n" * 20)
    (tmp_path / "own.txt").write_text("w9 w2 w3\n" * 20)
    inputs = [str(tmp_path / name) for name in ("text.txt", "own.txt")]
    own = [*inputs, "--tokenizer", str(model), "--output-prefix", str(tmp_path / "own")]
    assert main(["data", "prepare", *own]) == 0
    words = ["evaluate", str(model), "--split", "1,1,0", "--part", "training", "--device", "cpu"]
    words += ["--sequence-length", "16"]
    assert main([*words, "--data", str(tmp_path / "own")]) == 0
    assert "not checked" not in capsys.readouterr().err
    assert main([*words, "--data", str(folder / "corpus")]) == 2
    said = capsys.readouterr().err
    assert "corpus: was made with a vocabulary of 257 ids" in said and "the model's tokenizer" in said
    for name in ("bin", "idx"):
        (tmp_path / f"unknown.{name}").write_bytes((tmp_path / f"own.{name}").read_bytes())
    assert main([*words, "--data", str(tmp_path / "unknown")]) == 0
    assert "has no record of its tokenizer" in capsys.readouterr().err
