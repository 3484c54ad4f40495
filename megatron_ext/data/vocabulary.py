# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a corpus' ids are of: its own record decides, and what is given beside it has to agree.

The record is PREFIX.json, which `data prepare` writes. Corpora of other makers (Megatron's preprocess_data.py) have
none; for them the vocabulary has to be given, and their ids are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.data.corpus_files import check_corpus, check_index, token_type
from megatron_ext.data.largest_id import largest_id
from megatron_ext.data.output import has_sidecar, output_paths, read_sidecar
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError

__all__ = ["Corpus", "Vocabulary", "VocabularyConfig", "check_corpora"]


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """A vocabulary as the user gives it: at most one of the three; none leaves it to the corpus' record."""

    tokenizer: TokenizerSpec | None = None
    """A Hugging Face tokenizer."""

    vocab_size: int | None = None
    """Number of ids, of which the last one ends documents."""

    vocab_file: str | None = None
    """JSON file of a GPT-2 vocabulary."""

    merge_file: str | None = None
    """Its merges."""

    tokenizer_name: str = "--tokenizer"
    """What `tokenizer` is given by, for messages."""

    vocab_size_name: str = "--vocab-size"
    """What `vocab_size` is given by."""

    files_names: tuple[str, str] = ("--vocab-file", "--merge-file")
    """What the two files are given by."""

    def validate(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: Names every bad field.
        """
        wrong = []
        files, (vocab_name, merge_name) = (self.vocab_file, self.merge_file), self.files_names
        if (self.vocab_file is None) != (self.merge_file is None):
            wrong.append(f"{vocab_name} is {files[0]} and {merge_name} {files[1]}; give both, or neither")
        given = {
            self.tokenizer_name: self.tokenizer,
            self.vocab_size_name: self.vocab_size,
            vocab_name: self.vocab_file,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            wrong.append(f"{' and '.join(names)} each say which vocabulary it is; give one of them")
        if self.vocab_size is not None and self.vocab_size < 1:
            wrong.append(f"{self.vocab_size_name} is {self.vocab_size}; give a whole number above 0")
        if wrong:
            raise UserError("; ".join(wrong))

    def ways(self) -> str:
        """Return how to give a vocabulary, as the end of a message."""
        vocab_name, merge_name = self.files_names
        return (
            f"set {self.tokenizer_name} to its folder (Hugging Face), {self.vocab_size_name} to the number of its ids, "
            f"or {vocab_name} and {merge_name} (GPT-2)"
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A vocabulary that is known."""

    said_by: str
    """Who says so, for messages."""

    size: int | None
    """Number of ids; None if that cannot be told on this machine."""

    eod: int | None
    """The id that ends documents, where it is known."""

    megatron_args: tuple[str, ...]
    """The flags with which stock Megatron takes it."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What is known of one corpus."""

    prefix: str
    """Of its files."""

    sequences: int
    """How many there are in its index."""

    tokens: int
    """How many it has."""

    largest_id: int
    """No id is larger."""


def check_corpora(
    prefixes: Sequence[str], given: VocabularyConfig, *, tell: Callable[[str], None]
) -> tuple[Vocabulary, list[Corpus]]:
    """Find the vocabulary of corpora that are trained on together.

    Args:
        prefixes: Of the corpora, at least one.
        given: What the user says of the vocabulary.
        tell: Prints a line: what is not checked, and what takes long.

    Returns:
        The vocabulary, and the corpora; none of them if the vocabulary is not on this machine, which `tell` says.

    Raises:
        UserError: A corpus is incomplete; nothing says what its vocabulary is; two disagree; or an id is beyond it.
    """
    given.validate()
    chosen = _given_vocabulary(given)
    if chosen is not None and chosen.size is None:
        told = ", ".join(prefixes)
        tell(f"{chosen.said_by} is not on this machine: whether the ids of {told} are in it is not checked")
        return chosen, []
    corpora = []
    for prefix in prefixes:
        if "://" in prefix:
            raise UserError(f"{prefix}: is not on this machine, where it could be checked; give a path")
        if chosen is None and not has_sidecar(Path(prefix)):
            raise UserError(
                f"{prefix}: has no record of its vocabulary ({prefix}.json, which data prepare writes); {given.ways()}"
            )
        check_corpus(prefix)
        record = _record(prefix)
        said = None if record is None else _recorded_vocabulary(prefix, record, given, is_used=chosen is None)
        if said is not None and chosen is not None:
            _refuse_difference(prefix, said, chosen)
        chosen = chosen or said
        assert chosen is not None, "what has no record has been refused"
        assert chosen.size is not None, "what is not known has been given, and returned from above"
        largest = (
            largest_id(prefix, below=chosen.size, tell=tell)
            if record is None
            else int(record.get("largest_id", record["vocab_size"] - 1))
        )
        if largest >= chosen.size:
            raise UserError(
                f"{prefix}: has the id {largest}, but {chosen.said_by} has {chosen.size:,} ids, 0 to "
                f"{chosen.size - 1}; give the vocabulary that it was made with"
            )
        corpora.append(_corpus(prefix, largest))
    assert chosen is not None, "there is a corpus"
    return chosen, corpora


def _given_vocabulary(given: VocabularyConfig) -> Vocabulary | None:
    if given.tokenizer is not None:
        return _of_tokenizer(given.tokenizer, given.tokenizer_name)
    if given.vocab_size is not None:
        size = given.vocab_size
        args = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))
        return Vocabulary(said_by=f"{given.vocab_size_name} {size}", size=size, eod=size - 1, megatron_args=args)
    if given.vocab_file is None or given.merge_file is None:
        return None
    said_by = f"{given.files_names[0]} {given.vocab_file}"
    args = ("--vocab-file", given.vocab_file, "--merge-file", given.merge_file)
    path = Path(given.vocab_file)
    known = _ids_of_vocabulary_file(path, said_by) if path.exists() else None
    return Vocabulary(said_by=said_by, size=known, eod=None, megatron_args=args)


def _of_tokenizer(spec: TokenizerSpec, name: str) -> Vocabulary:
    said_by, args = f"{name} {spec.folder}", tuple(spec.megatron_args())
    # A name of a model hub, which Megatron may find in a cache. A path is one that is not there.
    if spec.folder is not None and not Path(spec.folder).exists() and not spec.folder.startswith(("/", ".", "~")):
        return Vocabulary(said_by=said_by, size=None, eod=None, megatron_args=args)
    tokenizer = spec.load()
    return Vocabulary(said_by=said_by, size=tokenizer.vocab_size, eod=tokenizer.eod, megatron_args=args)


def _ids_of_vocabulary_file(path: Path, said_by: str) -> int:
    try:
        return 1 + max(int(number) for number in json.loads(path.read_text(encoding="utf-8")).values())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{said_by}: is no file of a GPT-2 vocabulary ({error}); give its vocab.json") from error


def _record(prefix: str) -> dict[str, Any] | None:
    """Return what `data prepare` has written of a corpus; None if it did not make it.

    Raises:
        UserError: It is of another release, or of another .bin file.
    """
    path = Path(prefix)
    if not has_sidecar(path):
        return None
    record = read_sidecar(path)
    for suffix in ("bin", "idx"):
        file = output_paths(path)[suffix]
        size, wanted = file.stat().st_size, record["output_bytes"][suffix]
        if size != wanted:
            raise UserError(
                f"{prefix}.json: tells of a {file.name} of {wanted} bytes, which has {size}; make the corpus again, or "
                "remove that .json if the files are another one's"
            )
    return record


def _recorded_vocabulary(prefix: str, record: dict[str, Any], given: VocabularyConfig, *, is_used: bool) -> Vocabulary:
    """Return the vocabulary in a record; where it `is_used`, its tokenizer has to be there, and the same."""
    said_by = f"the record {prefix}.json"
    known = record["tokenizer"]
    spec = TokenizerSpec(folder=known["folder"], trust_remote_code=known["trust_remote_code"])
    size, eod = int(record["vocab_size"]), int(record["eod"])
    found = Vocabulary(said_by=said_by, size=size, eod=eod, megatron_args=tuple(spec.megatron_args()))
    if not is_used or spec.folder is None:
        return found
    if not Path(spec.folder).is_dir():
        raise UserError(
            f"{prefix}: was made with the tokenizer in {spec.folder}, which is not there; set {given.tokenizer_name} "
            "to its folder"
        )
    if spec.fingerprint() != known["fingerprint"]:
        _refuse_difference(prefix, found, _of_tokenizer(spec, "today's tokenizer"))
    return found


def _refuse_difference(prefix: str, recorded: Vocabulary, other: Vocabulary) -> None:
    same_end = recorded.eod == other.eod or other.eod is None
    if recorded.size == other.size and same_end:
        return
    what = f"{other.size:,} ids" if recorded.size != other.size else f"another end of documents ({other.eod})"
    raise UserError(
        f"{prefix}: was made with a vocabulary of {recorded.size:,} ids whose documents end with {recorded.eod} "
        f"({recorded.said_by}), but {other.said_by} has {what}; give the one that it was made with, or none"
    )


def _corpus(prefix: str, largest: int) -> Corpus:
    index = Path(f"{prefix}.idx")
    tokens = Path(f"{prefix}.bin").stat().st_size // token_type(index).itemsize
    return Corpus(prefix=prefix, sequences=check_index(index), tokens=tokens, largest_id=largest)
