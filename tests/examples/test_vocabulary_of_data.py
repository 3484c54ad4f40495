# SPDX-License-Identifier: Apache-2.0
"""The launch scripts train data with the vocabulary that they are of, or start nothing."""

import argparse
import json
import pathlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ext.data.tokenizers import TokenizerSpec
from tests.examples.desk import RECORD_ARGUMENTS, Desk
from tests.support.corpus import make, make_tokenizer, write_json_lines, write_without_record
from tests.support.distributed import REPOSITORY
from tests.support.every_run import one_of_each
from tests.support.ports import free_port

SPES = REPOSITORY / "examples/spes/run_single_node.sh"
LIST = REPOSITORY / "examples/spes/list_processed_files.sh"
CLUSTER = REPOSITORY / "examples/spes/run_cluster.sh"
LOCAL_SGD = REPOSITORY / "examples/local_sgd/train_gpt3_diloco_single_node.sh"
HOT_SWITCH = REPOSITORY / "examples/hot_switch/llama_hot_switch.sh"
STATIC = REPOSITORY / "examples/hot_switch/llama_static_parallel.sh"
SCRIPTS = (SPES, LOCAL_SGD, HOT_SWITCH, STATIC)
# The static script reads its options with the hot one's code.
by_name = pytest.mark.parametrize("script", one_of_each(SCRIPTS, {0, 2}), ids=lambda path: path.stem)

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
    return desk.run(script, arguments, BACKEND="cpu", **{"OUTPUT": str(desk.folder / "out"), **own, **environment})


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
    Path(files["MERGE_FILE"]).write_text("#version: 0.2\n")
    line = refusal(desk, SPES, prefix, **files)
    assert f"{prefix}: has the id 300, but VOCAB_FILE {files['VOCAB_FILE']} has 300 ids" in line
    Path(files["VOCAB_FILE"]).write_text(json.dumps({f"t{number}": number for number in range(301)}))
    assert has(recorded(desk, SPES, prefix, **files), ["--vocab-file", files["VOCAB_FILE"], "--merge-file"])


@pytest.mark.parametrize("name", ["TOKENIZER", "VOCAB_SIZE"])
@pytest.mark.parametrize("script", [SPES, LOCAL_SGD], ids=lambda path: path.stem)
def test_a_vocabulary_for_no_data_is_refused(desk: Desk, script: Path, name: str) -> None:
    assert f"{name} is for the data of a DATA_PATH, which is not set" in refusal(desk, script, "", **{name: "9"})


@by_name
def test_a_vocabulary_that_is_not_there_starts_nothing_and_is_named_by_its_variable(desk: Desk, script: Path) -> None:
    make(write_json_lines(desk.folder / "in.json", ["a text"]), desk.folder / "own")
    own = str(desk.folder / "own")
    vocab, merges = str(desk.folder / "vocab.json"), str(desk.folder / "merges.txt")
    assert "error: TOKENIZER ./x: not a folder" in refusal(desk, script, own, TOKENIZER="./x")
    line = refusal(desk, script, own, VOCAB_FILE=vocab, MERGE_FILE=merges)
    assert f"error: VOCAB_FILE {vocab}: is not there; give the vocab.json" in line
    Path(vocab).write_text(json.dumps({f"t{number}": number for number in range(257)}))
    line = refusal(desk, script, own, VOCAB_FILE=vocab, MERGE_FILE=merges)
    assert f"error: MERGE_FILE {merges}: is not there; give the merges.txt" in line
    line = refusal(desk, script, own, VOCAB_FILE=vocab)
    assert f"VOCAB_FILE is '{vocab}' and MERGE_FILE ''; set both, or neither" in line
    assert "VOCAB_FILE is '' and MERGE_FILE 'm'; set both" in refusal(desk, script, own, MERGE_FILE="m")
    Path(f"{own}.json").unlink()
    Path(merges).write_text("#version: 0.2\n")
    wanted = ["--vocab-file", vocab, "--merge-file", merges]
    assert has(recorded(desk, script, own, VOCAB_FILE=vocab, MERGE_FILE=merges), wanted)


@by_name
def test_a_damaged_record_starts_nothing(desk: Desk, script: Path) -> None:
    make(write_json_lines(desk.folder / "in.json", ["a text"]), desk.folder / "own")
    record = desk.folder / "own.json"
    record.write_bytes(record.read_bytes()[:100])
    assert f"error: {record}: not JSON" in refusal(desk, script, str(desk.folder / "own"), VOCAB_SIZE="257")


@by_name
def test_data_may_be_an_argument_or_a_variable(desk: Desk, script: Path) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    prefix = write_without_record(desk.folder / "foreign", [[5, 999, 7]])
    own = {"DATA_PATH": prefix, "VOCAB_SIZE": "1000", "BACKEND": "cpu", "OUTPUT": str(desk.folder / "out")}
    own |= {"MODE": "centralized", "RECORDED_ARGUMENTS": str(desk.folder / "arguments")}
    arguments = {SPES: ["0"], LOCAL_SGD: desk.outputs()}.get(script, [])
    code, output = desk.run(script, arguments, **own)
    assert code == 0, output
    words = (desk.folder / "arguments").read_text().splitlines()
    assert has(words, ["--data-path", prefix]) and has(words, ["--vocab-size", "1000"])


@pytest.mark.parametrize("script", [SPES, HOT_SWITCH], ids=lambda path: path.stem)
def test_several_corpora_are_trained_on_by_their_list(desk: Desk, script: Path) -> None:
    listed = desk.folder / "files.txt"
    prefixes = [write_without_record(desk.folder / f"data{number}", [[5, 999, 7]]) for number in range(2)]
    code, output = desk.run(LIST, [str(desk.folder), str(listed)])
    assert code == 0 and listed.read_text().split() == prefixes, output
    words = recorded(desk, script, "", DATA_ARGS_PATH=str(listed), VOCAB_SIZE="1000")
    assert has(words, ["--data-args-path", str(listed)]) and has(words, ["--vocab-size", "1000"])
    assert "--mock-data" not in words and "--data-path" not in words
    line = refusal(desk, script, "", DATA_ARGS_PATH=str(listed), VOCAB_SIZE="999")
    assert f"{prefixes[0]}: has the id 999" in line
    line = refusal(desk, script, prefixes[0], DATA_ARGS_PATH=str(listed))
    assert f"DATA_PATH is {prefixes[0]} and DATA_ARGS_PATH {listed}; set one of them" in line
    assert "DATA_ARGS_PATH: there is no file x" in refusal(desk, script, "", DATA_ARGS_PATH="x")


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("--vocab-size 9", "set VOCAB_SIZE"),
        ("--vocab-size=9", "set VOCAB_SIZE"),
        ("--tokenizer-model x", "set TOKENIZER"),
        ("--merge-file x", "set VOCAB_FILE and MERGE_FILE"),
        ("--data-path a b", "set DATA_PATH, or for several corpora DATA_ARGS_PATH"),
        ("--mock-data", "leave DATA_PATH empty"),
    ],
)
@pytest.mark.parametrize("script", [SPES, HOT_SWITCH, STATIC], ids=lambda path: path.stem)
def test_further_arguments_do_not_choose_data_or_vocabulary(desk: Desk, script: Path, word: str, instead: str) -> None:
    name = word.replace("=", " ").split()[0]
    message = f"EXTRA_ARGS has {name}, which is not checked against the data; {instead}"
    assert message in refusal(desk, script, "", EXTRA_ARGS=f"--seed 7\n{word}")


def test_a_cluster_starts_no_server_for_further_arguments_that_choose_data(desk: Desk) -> None:
    desk.command("torchrun", "echo started")
    environment = {"BACKEND": "cpu", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "INSECURE": "1", "OUTPUT": "out"}
    environment |= {"PORT": str(free_port()), "BIND": "127.0.0.1", "STATE_DIR": str(desk.folder / "state")}
    code, output = desk.run(CLUSTER, **environment, EXTRA_ARGS="--data-path x")
    assert code == 1 and "EXTRA_ARGS has --data-path" in output and len(output.splitlines()) == 1, output
    assert not (desk.folder / "state").exists()


def dry_run(desk: Desk, script: Path, data: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of a script's dry run, and all that it wrote."""
    arguments = {HOT_SWITCH: ["7b", "4096", "512", "", "1", "1", data]}.get(
        script, ["7b", "4096", "512", "1", "", "1", "1", data]
    )
    return desk.run(script, ["--print", *arguments], **environment)


@pytest.mark.parametrize("script", [HOT_SWITCH, STATIC], ids=lambda path: path.stem)
def test_a_dry_run_has_the_vocabulary_of_the_start_and_refuses_what_that_refuses(desk: Desk, script: Path) -> None:
    prefix, tokenizer = corpus_of_a_thousand_ids(desk.folder)
    code, output = dry_run(desk, script, prefix)
    (line,) = output.splitlines()
    assert code == 0 and has(shlex.split(line), ["--tokenizer-model", str(tokenizer), "--data-path", prefix]), output
    code, output = dry_run(desk, script, prefix, VOCAB_SIZE="9")
    assert code == 1 and "but VOCAB_SIZE 9 has 9 ids" in output and len(output.splitlines()) == 1
    # On another host, maybe.
    code, output = dry_run(desk, script, "no/such")
    assert code == 0 and "DATA_PATH: there is no no/such.idx on this machine: the dry run takes bytes" in output
    code, output = dry_run(desk, script, "no/such", VOCAB_SIZE="1000")
    (line,) = output.splitlines()
    assert code == 0 and has(shlex.split(line), ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"])


@pytest.mark.parametrize("script", [HOT_SWITCH, STATIC], ids=lambda path: path.stem)
def test_mock_data_are_of_the_vocabulary_that_is_given(desk: Desk, script: Path) -> None:
    words = recorded(desk, script, "", VOCAB_SIZE="1000")
    assert "--mock-data" in words and has(words, ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"])
    # Megatron takes the last one; the first is the model's own.
    assert words[len(words) - words[::-1].index("--vocab-size")] == "1000"
    code, output = dry_run(desk, script, "", VOCAB_SIZE="257")
    assert code == 0 and has(shlex.split(output), ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"])
    assert "error: TOKENIZER ./x: not a folder" in refusal(desk, script, "", TOKENIZER="./x")
    assert "VOCAB_SIZE is '0'; give a whole number above 0" in refusal(desk, script, "", VOCAB_SIZE="0")


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
    # About the logarithm of the 1,024 rows, as an untrained model has it; 257 ids have 384 rows, and less than 6.
    assert len(re.findall(r"iteration +1/ +2 .*lm loss: 6\.", output)) == 1, output[-6000:]
