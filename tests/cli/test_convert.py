# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext convert` as people call it."""

import argparse
import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.cli.main import main
from megatron_ext.convert.tokenizer_files import largest_id
from megatron_ext.convert.upcycle_config import UpcycleConfig
from tests.convert import models


def test_a_model_goes_there_and_back_and_takes_its_tokenizer_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = models.save("qwen3", tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    assert main(["convert", "from-hf", str(source), str(checkpoint), "--vocab-multiple", "64"]) == 0
    out = capsys.readouterr().out
    assert f"{checkpoint}: a checkpoint for --load, 94,592 parameters in fp32" in out
    flags = (checkpoint / "megatron_flags.txt").read_text().splitlines()
    assert flags[-2:] == ["--tokenizer-model", str(checkpoint / "tokenizer")]
    assert "  " + " ".join(flags) in out
    assert main(["convert", "to-hf", str(checkpoint), str(back), "--dtype", "bf16", "--max-shard-size", "50KB"]) == 0
    out = capsys.readouterr().out
    assert f"{back}: a qwen3 model, 25 tensors, 93,824 parameters in bf16" in out
    assert "6 rows that pad the vocabulary were left out" in out and "tokenizer" not in out
    assert (back / "tokenizer.json").exists() and len(list(back.glob("*.safetensors"))) > 2


def test_the_flags_mean_the_same_in_every_folder_and_reach_megatron_word_by_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, there = tmp_path / "a folder", tmp_path / "0"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    source = models.save("qwen3_moe, dense layer", Path("model"))
    (source / "tokenizer.json").write_text("{}")
    assert main(["convert", "from-hf", "model", "start"]) == 0
    # As docs/convert.md shows it, in a folder with a file that the brackets of --moe-layer-freq would name.
    script = 'mapfile -t MODEL_ARGS <"$1" && printf "%s\\n" "${MODEL_ARGS[@]}"'
    command = ["bash", "-c", script, "bash", str(here / "start" / "megatron_flags.txt")]
    words = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert words[words.index("--moe-layer-freq") + 1] == "[0,1]"
    assert words[-2:] == ["--tokenizer-model", str(here / "start" / "tokenizer")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["from-hf", "nowhere", "out"], "nowhere: no such folder"),
        (["from-hf", "model", "out", "--vocab-multiple", "0"], "--vocab-multiple 0: give a whole number"),
        (["to-hf", "nowhere", "out"], "nowhere: neither a checkpoint, a snapshot nor the folder of a sync service"),
        (["to-hf", "empty", "out"], "empty: neither a checkpoint"),
        (["to-hf", "empty", "out", "--max-shard-size", "5 parsecs"], "--max-shard-size 5 parsecs: give a number"),
        (["to-hf", "checkpoint", "out", "--weights", "average"], "--weights average: give model, anchor, or worker:N"),
        (["to-hf", "checkpoint", "out", "--family", "gpt2"], "model_type is 'gpt2'; what converts is llama"),
        (["to-hf", "checkpoint", "out", "--hf-config", "empty"], "no config.json and no hf_config.json is there"),
        (["to-hf", "checkpoint", "out", "--iteration", "7"], "not a torch_dist checkpoint"),
        (["to-hf", "checkpoint", "model"], "something is there already"),
        (["to-hf", "checkpoint", "out", "--vocab-size", "251"], "the model says (251, 64)"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if {"model", "checkpoint"} & set(words):
        models.save("llama", tmp_path / "model")
    if "checkpoint" in words:
        assert main(["convert", "from-hf", "model", "checkpoint"]) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("megatron-ext: error:") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def tokenizer(folder: Path, ids: int) -> Path:
    """Write the file of a tokenizer with `ids` ids, the last one of them an added token."""
    folder.mkdir(exist_ok=True)
    content = {"model": {"vocab": {f"w{at}": at for at in range(ids - 1)}}, "added_tokens": [{"id": ids - 1}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 250 tokens in 256 rows, with their tokenizer."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer(models.save("llama", folder / "model"), 250)
    words = ["convert", "from-hf", str(folder / "model"), str(folder / "start"), "--vocab-multiple", "64"]
    assert main(words) == 0
    return folder / "start"


@pytest.mark.parametrize("given", ["nothing", "model", "checkpoint", "tokenizer of the checkpoint", "another"])
def test_a_tokenizer_is_found_where_the_model_has_it(given: str, start: Path, tmp_path: Path):
    another = tokenizer(tmp_path / "another", 100)
    words = {
        "nothing": [],
        "model": ["--hf-config", str(start.parent / "model")],
        "checkpoint": ["--hf-config", str(start)],
        "tokenizer of the checkpoint": ["--tokenizer", str(start)],
        "another": ["--tokenizer", str(another)],
    }[given]
    # As a job's folder, which has no tokenizer of its own.
    run = tmp_path / "run"
    shutil.copytree(start, run, ignore=None if given == "nothing" else shutil.ignore_patterns("tokenizer"))
    assert main(["convert", "to-hf", str(run), str(tmp_path / "out"), *words]) == 0
    assert largest_id(tmp_path / "out") == (99 if given == "another" else 249)


def test_a_job_of_which_no_special_tokens_are_known_is_told(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = "its config.json names no special tokens, as SOURCE knows none; --hf-config MODEL takes those of MODEL"
    run = tmp_path / "run"
    shutil.copytree(start, run, ignore=shutil.ignore_patterns("hf_config.json"))
    for source, words, told in ((start, [], False), (run, [], True), (run, ["--hf-config", str(start)], False)):
        assert main(["convert", "to-hf", str(source), str(tmp_path / "out"), "--overwrite", *words]) == 0
        assert (said in capsys.readouterr().out) == told
        assert ("eos_token_id" in json.loads((tmp_path / "out" / "config.json").read_text())) != told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: no tokenizer is there"),
        (["--tokenizer", "empty"], "--tokenizer empty: no tokenizer is there"),
        (["--tokenizer", "large"], "--tokenizer large: the tokenizer's ids go up to 250, and the model has 250 rows"),
        (["--vocab-size", "249"], "--vocab-size 249: 250 rows of the vocabulary are tokens, of which this would cut"),
        (["--vocab-size", "0"], "--vocab-size 0: give a whole number of at least 1"),
        (["--hf-config", "config.json"], "describes another model than the checkpoint: vocab_size is 250, there 200"),
    ],
)
def test_no_token_is_cut_off_and_no_other_tokenizer_taken(
    words: list[str],
    said: str,
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    tokenizer(tmp_path / "large", 251)
    config = json.loads((start / "hf_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    assert main(["convert", "to-hf", str(start), "out", *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_ids_than_its_own_model_goes_with_it_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokenizer(models.save("llama", tmp_path / "model"), 252)
    for command, source, target in (("from-hf", "model", "start"), ("to-hf", "start", "out")):
        assert main(["convert", command, str(tmp_path / source), str(tmp_path / target)]) == 0
        assert "has ids up to 251, and the model 250 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "largest"),
    [
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.5], ["b", 0.5]]}, "added_tokens": []}}, 1),
        ({"vocab.json": {"a": 0, "b": 7}, "added_tokens.json": {"c": 9}}, 9),
        ({"tokenizer_config.json": {"added_tokens_decoder": {}}}, None),
    ],
)
def test_the_largest_id_is_read_of_every_kind_of_file(files: dict[str, object], largest: int | None, tmp_path: Path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert largest_id(tmp_path) == largest


def test_the_flags_of_upcycling_are_the_fields_of_its_config(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["convert", "upcycle", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for entry in fields(UpcycleConfig):
        assert f"--{entry.name.replace('_', '-')}" in told
    assert "Copies of every MLP (default: 8)" in told and "{normal,zeros,mlp}" in told
    parser = argparse.ArgumentParser()
    add_fields(parser, UpcycleConfig)
    for words, untied in (([], False), (["--untie-embeddings"], True)):
        assert from_options(UpcycleConfig, parser.parse_args(words)) == UpcycleConfig(untie_embeddings=untied)


def test_a_dense_checkpoint_becomes_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    models.save("qwen2", tmp_path / "model")
    start, out = tmp_path / "start", tmp_path / "out"
    assert main(["convert", "from-hf", str(tmp_path / "model"), str(start)]) == 0
    assert main(["convert", "upcycle", str(start), str(out), "--num-experts", "4", "--router-init", "zeros"]) == 0
    told = capsys.readouterr().out
    assert "--num-experts 4 --moe-ffn-hidden-size 96" in told
    # A qwen2_moe has a shared expert, and this one none.
    assert "no Hugging Face layout that is known can say this mixture: to-hf will refuse it" in told
    assert main(["convert", "upcycle", str(start), str(out), "--topk", "9", "--overwrite"]) == 2
    assert "--topk 9: there are 8 copies" in capsys.readouterr().err and (out / "release").is_dir()
