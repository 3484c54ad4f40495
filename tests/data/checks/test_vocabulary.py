# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a corpus is of, and that no id is beyond it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.checks.largest_id import note_path
from megatron_ext.data.tokenizers import TokenizerSpec
from tests.support.corpus import make, make_tokenizer, write_json_lines, write_without_record


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `data check`; return its status, output and errors."""
    capsys.readouterr()
    status = main(["data", "check", *words])
    return status, *capsys.readouterr()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which `data check` refuses."""
    status, output, errors = check(capsys, *words)
    assert (status, output) == (2, ""), (output, errors)
    (line,) = errors.splitlines()
    return line.removeprefix("megatron-ext: error: ")


@pytest.fixture
def own(tmp_path: Path) -> str:
    """Return a corpus of bytes with its record."""
    make(write_json_lines(tmp_path / "in.jsonl", ["one", "two"]), tmp_path / "own")
    return str(tmp_path / "own")


def test_the_record_of_a_corpus_says_its_vocabulary(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, own) == (
        0,
        f"{own}: 2 sequences, 8 tokens, no id above 256\nvocabulary: 257 ids (the record {own}.json)\nuse with:\n"
        f"  --tokenizer-type NullTokenizer --vocab-size 257 --data-path {own}\n",
        "",
    )
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
    assert check(capsys, "--for-script", own) == (0, "\n".join(words) + "\n", "")


def test_a_record_of_before_ids_were_counted_has_ids_below_its_vocabulary(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Path(f"{own}.json")
    content = json.loads(record.read_text())
    assert content.pop("largest_id") == 256
    record.write_text(json.dumps(content))
    assert check(capsys, own)[0] == 0


def test_a_tokenizer_in_the_record_is_found_from_other_folders_and_refused_when_it_is_gone_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    folder = make_tokenizer(tmp_path / "tok")
    write_json_lines(tmp_path / "in.jsonl", ["hello world"] * 3)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", "in.jsonl", "--tokenizer", "tok", "--output-prefix", "corpus"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    prefix, size = str(tmp_path / "corpus"), json.loads((tmp_path / "corpus.json").read_text())["vocab_size"]
    wanted = f"--tokenizer-type\nHuggingFaceTokenizer\n--tokenizer-model\n{folder}\n"
    assert check(capsys, "--for-script", prefix) == (0, wanted, "")
    # Something beside the vocabulary is another one's.
    (folder / "README").write_text("what it is")
    assert check(capsys, "--for-script", prefix) == (0, wanted, "")
    assert "but --vocab-size 257 has 257 ids; give the one" in refusal(capsys, prefix, "--vocab-size", "257")
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert f"made with the tokenizer in {folder}, which is not there; set TOKENIZER to its folder" in refusal(
        capsys, prefix, "--for-script"
    )
    assert check(capsys, prefix, "--tokenizer", str(moved))[0] == 0
    content = json.loads((moved / "tokenizer.json").read_text())
    more = {"id": size, "content": "<more>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append({**more, "normalized": False})
    (moved / "tokenizer.json").write_text(json.dumps(content))
    assert f"of {size} ids whose documents end with 0" in refusal(capsys, prefix, "--tokenizer", str(moved))
    moved.rename(folder)
    assert f"but today's tokenizer {folder} has {size + 1} ids" in refusal(capsys, prefix)


def test_a_corpus_without_a_record_needs_a_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 999, 5]])
    assert refusal(capsys, prefix) == (
        f"{prefix}: has no record of its vocabulary ({prefix}.json, which data prepare writes); set --tokenizer to its "
        "folder (Hugging Face), --vocab-size to the number of its ids, or --vocab-file and --merge-file (GPT-2)"
    )
    assert "set TOKENIZER to its folder (Hugging Face), VOCAB_SIZE to the number of its ids, or VOCAB_FILE" in refusal(
        capsys, prefix, "--for-script"
    )
    # As the file may be called that a corpus was made of.
    Path(f"{prefix}.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert "has no record of its vocabulary" in refusal(capsys, prefix)
    assert check(capsys, prefix, "--vocab-size", "1000")[0] == 0


@pytest.mark.parametrize(("dtype", "largest"), [(np.int32, 70_000), (np.uint16, 999)])
def test_ids_beyond_the_vocabulary_are_refused_by_the_largest_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: type, largest: int
) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 5], [largest, 7], [3]], dtype)
    size = str(largest)
    assert refusal(capsys, prefix, "--vocab-size", size) == (
        f"{prefix}: has the id {largest}, but --vocab-size {size} has {largest:,} ids, 0 to {largest - 1}; give the "
        "vocabulary that it was made with"
    )
    assert check(capsys, prefix, "--vocab-size", str(largest + 1))[0] == 0


def test_the_largest_id_is_looked_for_once_and_again_when_the_tokens_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 5, 9]])
    assert check(capsys, prefix, "--vocab-size", "10")[0] == 0
    note = note_path(prefix)
    assert note.name == ".a.largest_id.json" and json.loads(note.read_text())["largest_id"] == 9
    note.write_text(note.read_text().replace('"largest_id": 9', '"largest_id": 8'))
    assert "no id above 8" in check(capsys, prefix, "--vocab-size", "10")[1]
    write_without_record(tmp_path / "a", [[1, 5, 20]])
    os.utime(f"{prefix}.bin", ns=(0, 0))
    assert "has the id 20" in refusal(capsys, prefix, "--vocab-size", "10")
    note.write_text("{")
    assert "has the id 20" in refusal(capsys, prefix, "--vocab-size", "10")
    note.unlink()
    note.mkdir()  # where nothing can be written, as in a folder of somebody else
    assert "has the id 20" in refusal(capsys, prefix, "--vocab-size", "10")


def test_sixteen_bits_are_not_read_for_a_vocabulary_that_has_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_without_record(tmp_path / "a", [[65_535]], np.uint16)
    assert check(capsys, prefix, "--vocab-size", "65536")[0] == 0
    assert not note_path(prefix).exists()
    assert "has the id 65535" in refusal(capsys, prefix, "--vocab-size", "65535")


def test_tokens_that_are_no_ids_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, -2]])
    assert "a.bin: holds the id -2, below 0" in refusal(capsys, prefix, "--vocab-size", "9")
    prefix = write_without_record(tmp_path / "b", [[1, 2]], np.float32)
    assert "b.bin: holds float32 numbers, not token ids" in refusal(capsys, prefix, "--vocab-size", "9")


def test_what_is_given_has_to_agree_with_the_record(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, own, "--vocab-size", "1000", "--for-script") == (
        f"{own}: was made with a vocabulary of 257 ids whose documents end with 256 (the record {own}.json), but "
        "VOCAB_SIZE 1000 has 1,000 ids; give the one that it was made with, or none"
    )
    assert check(capsys, own, "--vocab-size", "257")[0] == 0


def test_a_corpus_that_is_not_there_is_named_before_its_vocabulary_is_asked_for(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nonexistent"
    wanted = f"PREFIX {missing}: there is no {missing}.bin; give the prefix of a .bin/.idx corpus"
    assert refusal(capsys, str(missing)) == wanted
    for suffix in (".bin", ".idx"):
        assert refusal(capsys, own + suffix) == f"PREFIX {own}{suffix}: there is no {own}{suffix}.bin; " + (
            f"leave out the suffix {suffix}"
        )


def test_a_record_of_other_files_is_refused(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_without_record(Path(own), [[1, 999, 5]])
    assert refusal(capsys, own) == (
        f"{own}.json: tells of a own.bin of 16 bytes, which has 12; make the corpus again, or remove that .json if the "
        "files are another one's"
    )
    Path(f"{own}.bin").unlink()
    assert f"there is no {own}.bin" in refusal(capsys, own)


def test_corpora_that_are_blended_have_one_vocabulary(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    make(write_json_lines(tmp_path / "more.jsonl", ["three"]), tmp_path / "more")
    assert check(capsys, own, str(tmp_path / "more"))[1].endswith(f"--data-path {own} {tmp_path}/more\n")
    other = write_without_record(tmp_path / "a", [[1, 300]])
    assert f"{other}: has no record of its vocabulary" in refusal(capsys, other, own)
    assert f"{other}: has the id 300, but the record {own}.json has 257 ids" in refusal(capsys, own, other)
    spec = TokenizerSpec(folder=str(make_tokenizer(tmp_path / "tok")))
    make(tmp_path / "in.jsonl", tmp_path / "b", tokenizer=spec)
    assert f"{tmp_path}/b: was made with a vocabulary of " in refusal(capsys, own, str(tmp_path / "b"))


def test_the_files_of_a_gpt2_vocabulary_say_how_many_ids_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 300]])
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    files = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    assert f"VOCAB_FILE {vocab}: is not there; give the vocab.json of a GPT-2 vocabulary" in refusal(
        capsys, prefix, *files, "--for-script"
    )
    merges.write_text("#version: 0.2\n")
    vocab.write_text(json.dumps({f"t{number}": number for number in range(300)}))
    assert "has the id 300, but --vocab-file" in refusal(capsys, prefix, *files)
    vocab.write_text(json.dumps({f"t{number}": number for number in range(301)}))
    assert check(capsys, prefix, *files)[0] == 0
    vocab.write_text("[]")
    assert "is not a file of a GPT-2 vocabulary" in refusal(capsys, prefix, *files)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vocab-size", "0"], "--vocab-size is 0; give a whole number above 0"),
        (["--vocab-size", "9", "--tokenizer", "x"], "--tokenizer and --vocab-size each say which vocabulary it is"),
        (["--vocab-file", "x"], "--vocab-file is x and --merge-file None; give both, or neither"),
        (["--trust-remote-code"], "--trust-remote-code has no meaning without --tokenizer"),
        (["--tokenizer", "/no/such"], "--tokenizer /no/such: not a folder"),
    ],
)
def test_bad_settings_of_a_check_are_refused(
    own: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, own, *words)


def test_the_merges_of_a_gpt2_vocabulary_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 2]])
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    files = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    assert f"MERGE_FILE {merges}: is not there; give the merges.txt of VOCAB_FILE" in refusal(
        capsys, prefix, *files, "--for-script"
    )
    merges.write_text("")
    assert f"--merge-file {merges}: is empty" in refusal(capsys, prefix, *files)
    merges.write_text("#version: 0.2\na b\nb a\n")
    assert "line 3 has tokens that --vocab-file" in refusal(capsys, prefix, *files)
    assert "line 1 is not two tokens" in refusal(capsys, prefix, "--vocab-file", str(vocab), "--merge-file", str(vocab))
    assert "is not a file of a GPT-2 vocabulary" in refusal(
        capsys, prefix, "--vocab-file", str(merges), "--merge-file", str(vocab)
    )
    merges.write_text("#version: 0.2\na b\n")
    assert check(capsys, prefix, *files)[0] == 0


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> tuple[str, Path]:
    """Return a corpus that a tokenizer made, and that one's folder."""
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    folder = make_tokenizer(tmp_path / "tok")
    lines = write_json_lines(tmp_path / "in.jsonl", ["hello world"] * 3)
    make(lines, tmp_path / "made", tokenizer=TokenizerSpec(folder=str(folder)))
    return str(tmp_path / "made"), folder


@pytest.mark.parametrize("name", ["/no/such", "./tok", "../tok", "~/tok", "tok", "here/tok", "org/model/", "a/b/c"])
def test_a_path_of_no_tokenizer_is_refused_by_the_name_that_it_was_given_by(
    own: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, said in ((["--for-script"], "TOKENIZER"), ([], "--tokenizer")):
        assert refusal(capsys, own, "--tokenizer", name, *words).startswith(f"{said} {name}: not a folder")


def test_a_tokenizer_of_the_hub_that_is_not_here_leaves_the_checks_of_the_record(
    own: str, with_tokenizer: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, _ = with_tokenizer
    status, output, errors = check(capsys, prefix, "--tokenizer", "org/model", "--for-script")
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "org/model"]
    assert (status, output.split()) == (0, words)
    size = json.loads(Path(f"{prefix}.json").read_text())["vocab_size"]
    assert errors == (
        f"megatron-ext: TOKENIZER org/model is not on this machine: whether the ids of {prefix} are its own is not "
        f"checked, only that they are among the {size} of the record {prefix}.json\n"
    )
    # Of bytes no tokenizer of the hub is the one.
    assert "but --tokenizer org/model is another one" in refusal(capsys, own, "--tokenizer", "org/model")
    other = write_without_record(tmp_path / "other", [[1, 5000]])
    for prefixes in ((prefix, other), (other, prefix)):
        assert f"{other}: has the id 5000, but the record {prefix}.json has" in refusal(
            capsys, *prefixes, "--tokenizer", "org/model"
        )
    status, output, _ = check(capsys, other, "--tokenizer", "org/model")
    assert status == 0 and "ids not looked at" in output
    Path(f"{other}.bin").write_bytes(b"")
    assert "make the corpus again" in refusal(capsys, other, "--tokenizer", "org/model")
    Path(f"{prefix}.json").write_text('{"format": "megatron-ext corpus 1"}')
    assert "tokenizer.folder is missing" in refusal(capsys, prefix, "--tokenizer", "org/model")


def test_a_tokenizer_of_the_hub_is_looked_at_in_the_cache(
    with_tokenizer: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, folder = with_tokenizer
    other = make_tokenizer(tmp_path / "other", texts=["quite other words are here"] * 9, vocab_size=270)
    for name, source in (("own", folder), ("other", other)):
        repository = tmp_path / "hub" / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        shutil.copytree(source, repository / "snapshots" / ("0" * 40))
    # The library reads the variable when it is imported.
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    lines = [["data", "check", prefix, "--tokenizer", f"org/{name}"] for name in ("own", "other")]
    code = f"from megatron_ext.cli.main import main; print([main(line) for line in {lines!r}])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 2]"
    (error,) = done.stderr.splitlines()
    assert "but --tokenizer org/other has" in error


def test_another_tokenizer_of_the_same_size_and_end_is_refused(
    with_tokenizer: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, folder = with_tokenizer
    size = json.loads(Path(f"{prefix}.json").read_text())["vocab_size"]
    alike = tmp_path / "alike"
    shutil.copytree(folder, alike)
    # Whatever lies beside the tokenizer.
    (alike / "README.md").write_text("what it is")
    assert check(capsys, prefix, "--tokenizer", str(alike))[0] == 0
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    message = f"but --tokenizer {other} is another one, whose ids are of other tokens; give the one"
    assert message in refusal(capsys, prefix, "--tokenizer", str(other))
    # The same tokens, put together in another way.
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert message in refusal(capsys, prefix, "--tokenizer", str(other))
    files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    Path(files[3]).write_text("#version: 0.2\n")
    Path(files[1]).write_text(json.dumps({"<|endoftext|>": 0, **{f"t{number}": number for number in range(1, size)}}))
    assert f"but --vocab-file {files[1]} is another one" in refusal(capsys, prefix, *files)
    # A record of before digests has the fingerprint of the folder alone.
    record = json.loads(Path(f"{prefix}.json").read_text())
    del record["tokenizer_digests"]
    Path(f"{prefix}.json").write_text(json.dumps(record))
    assert check(capsys, prefix, "--tokenizer", str(folder))[0] == 0
    assert message in refusal(capsys, prefix, "--tokenizer", str(other))


def test_tokens_replaced_by_others_of_the_same_size_are_refused(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Path(f"{own}.bin")
    assert check(capsys, own)[0] == 0
    before, content = tokens.stat(), tokens.read_bytes()
    tokens.write_bytes(content[::-1])
    os.utime(tokens, ns=(before.st_atime_ns, before.st_mtime_ns))
    message = f"{own}.json: tells of other tokens than {own}.bin and {own}.idx have, which are of the same size"
    assert message in refusal(capsys, own)
    # Without what the record of today has, the largest id still tells.
    record = json.loads(Path(f"{own}.json").read_text())
    del record["output_digest"]
    Path(f"{own}.json").write_text(json.dumps(record))
    assert message in refusal(capsys, own)
    tokens.write_bytes(content)
    assert check(capsys, own)[0] == 0


@pytest.mark.parametrize("way", ["in place", "moved over it"])
def test_what_is_noted_of_tokens_is_not_taken_for_others_with_the_same_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    prefix = write_without_record(tmp_path / "a", [[1, 5, 9]])
    tokens = Path(f"{prefix}.bin")
    assert check(capsys, prefix, "--vocab-size", "10")[0] == 0
    before = tokens.stat()
    other = Path(f"{write_without_record(tmp_path / 'other', [[1, 5, 20]])}.bin")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    if way == "in place":
        shutil.copy2(other, tokens)  # as cp -p
    else:
        other.rename(tokens)
    assert (tokens.stat().st_size, tokens.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert "has the id 20" in refusal(capsys, prefix, "--vocab-size", "10")


def test_a_note_that_is_copied_with_its_corpus_is_not_of_the_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "from").mkdir()
    prefix = write_without_record(tmp_path / "from" / "a", [[1, 5, 9]])
    assert check(capsys, prefix, "--vocab-size", "10")[0] == 0
    shutil.copytree(tmp_path / "from", tmp_path / "to")
    copy = tmp_path / "to" / "a.bin"
    times = copy.stat()
    copy.write_bytes(np.array([1, 5, 20], np.int32).tobytes())
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "has the id 20" in refusal(capsys, str(tmp_path / "to" / "a"), "--vocab-size", "10")


DAMAGES: list[tuple[str, Any, str]] = [
    ("vocab_size", None, "vocab_size is missing"),
    ("vocab_size", "257", "vocab_size is '257', not a whole number from 1"),
    ("vocab_size", True, "vocab_size is True, not a whole number"),
    ("vocab_size", 0, "vocab_size is 0, not a whole number from 1"),
    ("eod", None, "eod is missing"),
    ("eod", 1.5, "eod is 1.5, not a whole number"),
    ("largest_id", "x", "largest_id is 'x', not a whole number"),
    ("tokenizer", None, "tokenizer.folder is missing"),
    ("tokenizer", [], "tokenizer.folder is missing"),
    ("tokenizer", {"folder": 5}, "tokenizer.folder is 5, not a text"),
    ("tokenizer", {"folder": None, "trust_remote_code": 1}, "tokenizer.trust_remote_code is 1, not true or false"),
    ("tokenizer", {"folder": None, "trust_remote_code": False}, "tokenizer.fingerprint is missing"),
    ("tokenizer_digests", [1], "tokenizer_digests is [1], not an object"),
    ("tokenizer_digests", {"tokens": 1}, "tokenizer_digests.tokens is 1, not a text"),
    ("output_bytes", None, "output_bytes.bin is missing"),
    ("output_bytes", {"bin": 16, "idx": "62"}, "output_bytes.idx is '62', not a whole number"),
    ("output_digest", 3, "output_digest is 3, not a text"),
    ("format", None, "format is not 'megatron-ext corpus 1', that of this release's"),
    ("format", "megatron-ext corpus 99", "format is not 'megatron-ext corpus 1', that of this release's"),
]


@pytest.mark.parametrize("given", [(), ("--vocab-size", "257")], ids=["alone", "with a size"])
@pytest.mark.parametrize(("field", "value", "message"), DAMAGES)
def test_a_damaged_record_is_refused_by_its_file_and_field(
    own: str, capsys: pytest.CaptureFixture[str], field: str, value: Any, message: str, given: tuple[str, ...]
) -> None:
    path = Path(f"{own}.json")
    record = json.loads(path.read_text())
    record.pop(field)
    if value is not None:
        record[field] = value
    path.write_text(json.dumps(record))
    line = refusal(capsys, own, *given)
    assert line.startswith(f"{path}: ") and message in line and "make the corpus again" in line


@pytest.mark.parametrize("given", [(), ("--vocab-size", "257")], ids=["alone", "with a size"])
@pytest.mark.parametrize("length", [0, 1, 10, 30, 31, 40, 300, -2])
def test_a_record_that_is_cut_off_is_not_taken_for_none(
    own: str, capsys: pytest.CaptureFixture[str], length: int, given: tuple[str, ...]
) -> None:
    path = Path(f"{own}.json")
    content = path.read_bytes()
    for damaged in (content[:length], content[:length].ljust(len(content), b"\0")):
        path.write_bytes(damaged)
        line = refusal(capsys, own, *given)
        assert line.startswith(f"{path}: ") and "make the corpus again" in line


def test_a_record_that_cannot_be_read_is_not_taken_for_none(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"{own}.json")
    path.unlink()
    path.symlink_to("gone.json")
    line = refusal(capsys, own, "--for-script")
    assert line.startswith(f"{path}: is a link to gone.json, which is not there; remove that file, and make the corpus")
    assert "again with megatron-ext data prepare, or set TOKENIZER to its folder" in line
    assert "is a link to gone.json" in refusal(capsys, own, "--vocab-size", "257")
    path.unlink()
    path.mkdir()
    assert refusal(capsys, own).startswith(f"{path}: cannot be read (Is a directory); remove that file")
    path.rmdir()
    path.write_text('{"format": "megatron-ext corpus 1", "deep": ' + "[" * 200_000)
    assert refusal(capsys, own).startswith(f"{path}: ")


def test_a_vocabulary_can_be_looked_at_without_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "--vocab-size", "9", "--for-script")[1] == "--tokenizer-type\nNullTokenizer\n--vocab-size\n9\n"
    assert "--tokenizer ./x: not a folder" in refusal(capsys, "--tokenizer", "./x")
    assert "nothing says which vocabulary it is; set --tokenizer" in refusal(capsys)
    assert "there is no /.bin; give the prefix of a .bin/.idx corpus" in refusal(capsys, "/")
