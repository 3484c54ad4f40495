# SPDX-License-Identifier: Apache-2.0
"""examples/spes/tokenize_data.py: texts to shards as SPES' own script writes them, and back into Megatron's corpus."""

import gzip
import json
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.cli.main import main
from megatron_ext.data.shards.tokenize_texts import TokenizeConfig, tokenize
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError
from tests.support.corpus import make, make_tokenizer, read_corpus, write_json_lines
from tests.support.distributed import REPOSITORY

SCRIPT = REPOSITORY / "examples/spes/tokenize_data.py"
BYTES = TokenizerSpec()
EOD = 256


@pytest.fixture(name="script", scope="module")
def fixture_script() -> Callable[[list[str]], int]:
    """Return the script's `main`."""
    found: Callable[[list[str]], int] = runpy.run_path(str(SCRIPT))["main"]
    return found


def ids_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*text.encode(), EOD)]


def read(path: Path, dtype: str = "uint32") -> list[int]:
    found: list[int] = np.fromfile(path, dtype).tolist()
    return found


def write_files(folder: Path, count: int) -> list[list[str]]:
    """Write files of JSON lines; return their texts."""
    folder.mkdir()
    texts = [[f" {number} a \u00e9\n", "", f"{number} b" * number] for number in range(count)]
    for number, lines in enumerate(texts):
        write_json_lines(folder / f"{number}.jsonl{'.gz' if number % 2 else ''}", lines)
    return [[text.strip() for text in lines if text.strip()] for lines in texts]


def test_the_seeds_command_line_makes_its_files_and_prepare_reads_them_back(
    tmp_path: Path, script: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    from tokenizers import processors

    # It would put a token before every text, of which SPES' script wants none.
    special = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer = make_tokenizer(tmp_path / "tokenizer", post_processor=special)
    texts = [text for lines in write_files(tmp_path / "in", 3) for text in lines]
    prefix = str(tmp_path / "out/tokenized_")
    command = f"--file_glob {tmp_path}/in/*.jsonl* --tokenizer_name_or_path {tokenizer} --output_prefix {prefix} "
    command += "--text_field text --processes 1 --batch_size 2 --max_shard_bytes 4294967296 --dtype uint32"
    assert script(command.split()) == 0
    assert "5 documents" in capsys.readouterr().out
    (shard,) = sorted((tmp_path / "out").glob("*.npy"))
    assert shard.name == "tokenized_000_000000.npy"
    assert read(shard).count(0) == 5  # the ends of documents alone
    record = json.loads((tmp_path / "out/tokenized_shards.json").read_text())
    assert (record["dtype"], record["documents"], record["shards"]) == ("uint32", 5, {shard.name: len(read(shard))})

    words = ["data", "prepare", str(tmp_path / "out"), "--format", "tokens", "--tokenizer", str(tokenizer)]
    assert main([*words, "--output-prefix", str(tmp_path / "ids")]) == 0
    documents = read_corpus(tmp_path / "ids")
    spec = TokenizerSpec(folder=str(tokenizer))
    decode = spec.load(special_tokens=False).decode
    assert [decode(document) for document in documents] == texts
    assert all(document[-1] == 0 for document in documents)


def test_shards_have_the_size_and_the_order_that_are_asked_for(tmp_path: Path) -> None:
    texts = ["a" * 3, "b" * 5, "c" * 20, "d"]
    path = write_json_lines(tmp_path / "in.jsonl", texts)
    config = {"files": (path,), "tokenizer": BYTES, "dtype": "uint16", "max_shard_bytes": 21}
    done = tokenize(TokenizeConfig(output_prefix=str(tmp_path / "out_"), **config))
    names = sorted(entry.name for entry in tmp_path.glob("*.npy"))
    # Ten ids each: two documents, a long one in three pieces, with room for the last after its end.
    assert list(done.shards.items()) == list(zip(names, [10, 10, 10, 3], strict=True))
    assert [token for name in names for token in read(tmp_path / name, "uint16")] == ids_of(texts)


@pytest.mark.parametrize("processes", [2, 3])
def test_each_process_has_its_share_of_the_files(tmp_path: Path, processes: int) -> None:
    texts = write_files(tmp_path / "in", 5)
    files = tuple(sorted((tmp_path / "in").iterdir()))
    config = TokenizeConfig(
        files=files, tokenizer=BYTES, output_prefix=str(tmp_path / "out_"), processes=processes, batch_size=1
    )
    assert tokenize(config).documents == 9
    shares = {2: [texts[:3], texts[3:]], 3: [texts[:2], texts[2:4], texts[4:]]}[processes]
    for number, share in enumerate(shares):
        ids = ids_of([text for lines in share for text in lines])
        assert read(tmp_path / f"out_{number:03}_000000.npy") == ids
    make(tmp_path, tmp_path / "corpus", file_format="tokens", globs=("out_*.npy",))
    assert len(read_corpus(tmp_path / "corpus")) == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ()}, "--file_glob: no file matches"),
        ({"processes": 0, "batch_size": 0}, "--processes 0: must be at least 1; --batch_size 0"),
        ({"max_shard_bytes": 3}, "--max_shard_bytes 3: has no room for one id"),
        ({"dtype": "uint8"}, "--dtype uint8: must be one of uint16, uint32"),
        ({"text_field": "body"}, r"1: no key 'body'; keys are 'id', 'text' \(--text_field\).*--on_error skip"),
        ({"text_field": "body", "on_error": "skip"}, "no document with text was found in 1 files"),
        ({"text_field": "body", "processes": 2}, "no key 'body'"),
    ],
)
def test_what_cannot_be_is_named_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", ["a"])
    fields = {"files": (path,), "tokenizer": BYTES, "output_prefix": str(tmp_path / "out/t_"), **changes}
    with pytest.raises(UserError, match=message):
        tokenize(TokenizeConfig(**fields))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_type_that_cannot_hold_all_ids_is_refused_before_anything_is_read(
    tmp_path: Path, script: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `data` is not installed")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    content = json.loads((tmp_path / "tokenizer/tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"x{number}": number for number in range(len(vocabulary), 70_000)})
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "in.txt").write_text("a text")
    command = ["--file_glob", str(tmp_path / "in.txt"), "--output_prefix", str(tmp_path / "t_")]
    command += ["--tokenizer_name_or_path", str(tokenizer)]
    assert script([*command, "--dtype", "uint16"]) == 2
    line = capsys.readouterr().err
    assert "--dtype uint16: holds ids up to 65,535, and the tokenizer has 70,000, which would wrap around" in line
    assert "use uint32 or uint64" in line and not list(tmp_path.glob("t_*"))
    assert script(command) == 0


def test_earlier_shards_are_kept_unless_they_are_to_be_replaced(
    tmp_path: Path, script: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"tokenizer": BYTES, "output_prefix": str(tmp_path / "t_")}
    first, second = (tmp_path / name for name in ("a.txt", "b.txt"))
    first.write_text("one")
    second.write_text("two")
    tokenize(TokenizeConfig(files=(first, second), processes=2, **fields))
    (tmp_path / "t_other.npy").write_bytes(b"mine")
    again = TokenizeConfig(files=(second,), **fields)
    with pytest.raises(UserError, match=r"t_000_000000.npy: exists; use --overwrite"):
        tokenize(again)
    replacing = TokenizeConfig(files=(second,), overwrite=True, **fields)
    tokenize(replacing)
    names = sorted(entry.name for entry in tmp_path.glob("t_*"))
    assert names == ["t_000_000000.npy", "t_other.npy", "t_shards.json"]
    assert read(tmp_path / "t_000_000000.npy") == ids_of(["two"])
    command = ["--file_glob", str(first), "--output_prefix", str(tmp_path / "x_")]
    assert script([*command, "--tokenizer_name_or_path", "org/model-that-nobody-has"]) == 2
    assert "model-that-nobody-has: not a folder, and not in the hub's cache" in capsys.readouterr().err


def test_damaged_files_are_left_out_and_listed_where_that_is_asked_for(tmp_path: Path) -> None:
    good = write_json_lines(tmp_path / "a.jsonl", ["good"])
    bad = tmp_path / "b.jsonl.gz"
    bad.write_bytes(gzip.compress(good.read_bytes() * 200)[:-9])
    fields = {"files": (good, bad), "tokenizer": BYTES, "output_prefix": str(tmp_path / "t_")}
    with pytest.raises(UserError, match=r"b.jsonl.gz:\d+: gzip data is truncated"):
        tokenize(TokenizeConfig(**fields))
    done = tokenize(TokenizeConfig(on_error="skip", **fields))
    assert len(done.problems) == 1 and "gzip data is truncated" in done.problems[0]
    assert done.documents >= 1
