# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a corpus is of, and that no id is beyond it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.largest_id import note_path
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
    # Whether Megatron finds it elsewhere cannot be told here; that nothing was checked is.
    status, output, errors = check(capsys, prefix, *files, "--for-script")
    assert (status, output.splitlines()) == (0, files)
    assert f"VOCAB_FILE {vocab} is not on this machine: whether the ids of {prefix} are in it is not checked" in errors
    vocab.write_text(json.dumps({f"t{number}": number for number in range(300)}))
    assert "has the id 300, but --vocab-file" in refusal(capsys, prefix, *files)
    vocab.write_text(json.dumps({f"t{number}": number for number in range(301)}))
    assert check(capsys, prefix, *files)[0] == 0
    vocab.write_text("[]")
    assert "is no file of a GPT-2 vocabulary" in refusal(capsys, prefix, *files)


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


def test_the_name_of_a_model_hub_is_passed_on_with_a_word_that_nothing_was_checked(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = check(capsys, own, "--tokenizer", "org/model", "--for-script")
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "org/model"]
    assert (status, output.split()) == (0, words)
    assert "TOKENIZER org/model is not on this machine: whether the ids of" in errors
