# SPDX-License-Identifier: Apache-2.0
"""The launch scripts train data with the vocabulary that they are of, or start nothing."""

import argparse
import json
import pathlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ext.data.tokenizers import TokenizerSpec
from tests.examples.desk import RECORD_ARGUMENTS, Desk
from tests.support.corpus import make, make_tokenizer, write_json_lines, write_without_record
from tests.support.distributed import REPOSITORY
from tests.support.ports import free_port

SPES = REPOSITORY / "examples/spes/run_single_node.sh"
CLUSTER = REPOSITORY / "examples/spes/run_cluster.sh"
LOCAL_SGD = REPOSITORY / "examples/local_sgd/train_gpt3_diloco_single_node.sh"
HOT_SWITCH = REPOSITORY / "examples/hot_switch/llama_hot_switch.sh"
STATIC = REPOSITORY / "examples/hot_switch/llama_static_parallel.sh"
SCRIPTS = (SPES, LOCAL_SGD, HOT_SWITCH, STATIC)
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)

BYTES = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]


def start(desk: Desk, script: Path, data: str, **environment: str) -> tuple[int, str]:
    """Run a script at toy size on data; return its exit code and everything that it wrote."""
    arguments = {
        SPES: ["0"],
        LOCAL_SGD: [*desk.outputs(), data],
        HOT_SWITCH: ["7b", "4096", "512", "", "1", "1", data],
        STATIC: ["7b", "4096", "512", "1", "", "1", "1", data],
    }[script]
    own: Mapping[str, str] = {
        SPES: {"DATA_PATH": data, "OUTPUT": str(desk.folder / "out"), "MODE": "centralized"},
        LOCAL_SGD: {"GPUS_PER_NODE": "2"},
    }.get(script, {})
    return desk.run(script, arguments, BACKEND="cpu", **{**own, **environment})


def recorded(desk: Desk, script: Path, data: str, **environment: str) -> list[str]:
    """Return the arguments that a script gives torchrun."""
    desk.command("torchrun", RECORD_ARGUMENTS)
    path = desk.folder / "arguments"
    code, output = start(desk, script, data, RECORDED_ARGUMENTS=str(path), **environment)
    assert code == 0, output
    return path.read_text().splitlines()


def has(words: list[str], wanted: list[str]) -> bool:
    """Return whether words follow one another in others."""
    return any(words[place : place + len(wanted)] == wanted for place in range(len(words)))


def refusal(desk: Desk, script: Path, data: str, **environment: str) -> str:
    """Return the one line with which a script refuses to start anything."""
    desk.command("torchrun", "echo started")
    code, output = start(desk, script, data, **environment)
    assert code == 1, output
    (line,) = output.splitlines()
    return line


def corpus_of_a_thousand_ids(folder: Path) -> tuple[str, Path]:
    """Return the prefix of a corpus and the folder of its tokenizer, which has 1,000 ids."""
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    assert json.decoder.__file__ and argparse.__file__ and pathlib.__file__
    sources = [Path(module.__file__).read_text() for module in (json.decoder, argparse, pathlib)]
    tokenizer = make_tokenizer(folder / "a tokenizer", vocab_size=1000, texts=sources)
    lines = [text for source in sources for text in source.split("\n\n")]
    spec = TokenizerSpec(folder=str(tokenizer))
    made = make(write_json_lines(folder / "in.json", lines), folder / "corpus", tokenizer=spec)
    assert (made.sidecar["vocab_size"], made.sidecar["largest_id"]) == (1000, 999)
    return str(folder / "corpus"), tokenizer


@by_name
def test_the_record_beside_the_data_decides_the_tokenizer(desk: Desk, script: Path) -> None:
    prefix, tokenizer = corpus_of_a_thousand_ids(desk.folder)
    words = recorded(desk, script, prefix)
    wanted = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    assert has(words, wanted) and has(words, ["--data-path", prefix])
    assert "--vocab-file" not in words and "257" not in words
    # Data that somebody else has made with it.
    Path(f"{prefix}.json").unlink()
    words = recorded(desk, script, prefix, TOKENIZER=str(tokenizer))
    assert has(words, wanted)


@by_name
def test_bytes_are_trained_as_bytes(desk: Desk, script: Path) -> None:
    make(write_json_lines(desk.folder / "in.json", ["a text"]), desk.folder / "corpus")
    words = recorded(desk, script, str(desk.folder / "corpus"))
    if script in (SPES, LOCAL_SGD):
        assert has(words, BYTES)
    else:
        # The rows of the embedding are the model's own.
        assert has(words, BYTES[:2]) and has(words, ["--vocab-size", "512"]) and words.count("--vocab-size") == 1


@by_name
def test_data_without_a_record_start_nothing_until_their_vocabulary_is_said(desk: Desk, script: Path) -> None:
    prefix = write_without_record(desk.folder / "foreign", [[5, 999, 7]])
    line = refusal(desk, script, prefix)
    assert f"{prefix}: has no record of its vocabulary" in line
    assert "set TOKENIZER to its folder (Hugging Face), VOCAB_SIZE to the number of its ids, or VOCAB_FILE" in line
    words = recorded(desk, script, prefix, VOCAB_SIZE="1000")
    assert has(words, ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"])
    assert "VOCAB_SIZE is 'x'; give a whole number above 0" in refusal(desk, script, prefix, VOCAB_SIZE="x")


@by_name
def test_ids_beyond_the_vocabulary_start_nothing(desk: Desk, script: Path) -> None:
    prefix = write_without_record(desk.folder / "foreign", [[5, 1000, 7]])
    line = refusal(desk, script, prefix, VOCAB_SIZE="1000")
    assert f"{prefix}: has the id 1000, but VOCAB_SIZE 1000 has 1,000 ids, 0 to 999" in line
    make(write_json_lines(desk.folder / "in.json", ["a text"]), desk.folder / "own")
    line = refusal(desk, script, str(desk.folder / "own"), VOCAB_SIZE="1000")
    assert "own: was made with a vocabulary of 257 ids" in line and "but VOCAB_SIZE 1000 has 1,000 ids" in line
    line = refusal(desk, script, prefix, VOCAB_SIZE="1001", TOKENIZER="x")
    assert "TOKENIZER and VOCAB_SIZE each say which vocabulary it is; give one of them" in line


def test_ids_beyond_the_files_of_a_vocabulary_start_nothing(desk: Desk) -> None:
    prefix = write_without_record(desk.folder / "foreign", [[5, 300, 7]])
    files = {"VOCAB_FILE": str(desk.folder / "vocab.json"), "MERGE_FILE": str(desk.folder / "merges.txt")}
    Path(files["VOCAB_FILE"]).write_text(json.dumps({f"t{number}": number for number in range(300)}))
    line = refusal(desk, SPES, prefix, **files)
    assert f"{prefix}: has the id 300, but VOCAB_FILE {files['VOCAB_FILE']} has 300 ids" in line
    Path(files["VOCAB_FILE"]).write_text(json.dumps({f"t{number}": number for number in range(301)}))
    assert has(recorded(desk, SPES, prefix, **files), ["--vocab-file", files["VOCAB_FILE"], "--merge-file"])


@pytest.mark.parametrize("name", ["TOKENIZER", "VOCAB_SIZE"])
@pytest.mark.parametrize("script", [SPES, LOCAL_SGD], ids=lambda path: path.stem)
def test_a_vocabulary_for_no_data_is_refused(desk: Desk, script: Path, name: str) -> None:
    assert f"{name} is for the data of a DATA_PATH, which is not set" in refusal(desk, script, "", **{name: "9"})


def test_a_cluster_starts_no_server_for_data_of_no_vocabulary(desk: Desk) -> None:
    desk.command("torchrun", "echo started")
    prefix = write_without_record(desk.folder / "foreign", [[5, 999, 7]])
    environment = {"BACKEND": "cpu", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "INSECURE": "1", "DATA_PATH": prefix}
    environment |= {"PORT": str(free_port()), "BIND": "127.0.0.1", "STATE_DIR": str(desk.folder / "state")}
    environment |= {"OUTPUT": str(desk.folder / "out")}
    for own, message in (({}, "has no record of its vocabulary"), ({"VOCAB_SIZE": "999"}, "has the id 999")):
        code, output = desk.run(CLUSTER, **environment, **own)
        assert code == 1 and message in output and len(output.splitlines()) == 1, output
        assert not (desk.folder / "state").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", [SPES, LOCAL_SGD], ids=lambda path: path.stem)
def test_a_corpus_of_a_thousand_ids_trains_with_a_thousand(desk: Desk, script: Path) -> None:
    prefix, _ = corpus_of_a_thousand_ids(desk.folder)
    code, output = start(desk, script, prefix, TRAIN_ITERS="2", MASTER_PORT=str(free_port()))
    assert code == 0, output[-6000:]
    assert "padded vocab (size: 1000) with 24 dummy tokens (new size: 1024)" in output
    # About the logarithm of the rows, as an untrained model has it.
    assert len(re.findall(r"iteration +1/ +2 .*lm loss: 6\.", output)) == 1, output[-6000:]
