# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a corpus' ids are of: its own record decides, and whatever the user gives has to agree.

The record is PREFIX.json, which `data prepare` writes. Corpora of other makers (Megatron's preprocess_data.py) have
none; for them the vocabulary has to be given. What the files hold is read, once, with a record and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.checks.given_vocabulary import Vocabulary, VocabularyConfig, given_vocabulary, of_tokenizer
from megatron_ext.data.checks.largest_id import has_no_larger_id, read_contents
from megatron_ext.data.checks.record import Record, read_record
from megatron_ext.data.corpus_files import check_corpus, check_index, token_type
from megatron_ext.data.output import output_paths
from megatron_ext.errors import UserError

__all__ = ["Checked", "Corpus", "Vocabulary", "VocabularyConfig", "check_corpora", "refuse_other_tokenizer"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What is known of one corpus."""

    prefix: str
    """Of its files."""

    sequences: int
    """How many there are in its index."""

    tokens: int
    """How many it has."""

    largest_id: int | None
    """No id is larger; None where it was not looked for, because there is no number to compare it with."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found."""

    megatron_args: tuple[str, ...]
    """The flags with which stock Megatron takes the vocabulary."""

    known: Vocabulary | None
    """Whose ids were compared; None if nothing on this machine knows how many there are."""

    corpora: list[Corpus]
    """In the order of their prefixes."""


def check_corpora(prefixes: Sequence[str], given: VocabularyConfig, *, tell: Callable[[str], None]) -> Checked:
    """Find the vocabulary of corpora that are trained on together.

    Args:
        prefixes: Of the corpora; without any, the vocabulary that is given is looked at alone.
        given: The vocabulary that the user gives.
        tell: Prints a line: what is not checked, and what takes long.

    Raises:
        UserError: A corpus is incomplete; nothing says what its vocabulary is; two disagree; or an id is beyond it.
    """
    chosen = given_vocabulary(given)
    # Of a tokenizer that is not on this machine, a record says how many ids there are.
    known = chosen if chosen is not None and chosen.size is not None else None
    records = []
    for prefix in prefixes:
        if "://" in prefix:
            raise UserError(f"{prefix}: is not on this machine, where it could be checked; give a path")
        check_corpus(prefix, option=given.data_name)
        record = read_record(prefix, fix=given.ways())
        if chosen is None and record is None:
            raise UserError(
                f"{prefix}: has no record of its vocabulary ({prefix}.json, which data prepare writes); {given.ways()}"
            )
        records.append(record)
        if record is not None:
            _check_sizes(prefix, record)
            said = _recorded_vocabulary(prefix, record, given, is_used=chosen is None)
            for other in (chosen, known):
                if other is not None:
                    _refuse_difference(prefix, said, other)
            chosen, known = chosen or said, known or said
    if chosen is None:
        raise UserError(f"nothing says which vocabulary it is; {given.ways()}")
    pairs = zip(prefixes, records, strict=True)
    corpora = [_corpus(prefix, _largest_id(prefix, record, known, tell)) for prefix, record in pairs]
    if chosen.size is None:
        among = "" if known is None else f", only that they are among the {known.size:,} of {known.said_by}"
        ids = f"the ids of {', '.join(prefixes)} are its own" if prefixes else "it has any"
        tell(f"{chosen.said_by} is not on this machine: whether {ids} is not checked{among}")
    return Checked(megatron_args=chosen.megatron_args, known=known, corpora=corpora)


def refuse_other_tokenizer(prefix: str, given: VocabularyConfig) -> bool:
    """Refuse a corpus whose record names another vocabulary than the given one; its tokens are not looked at.

    Args:
        prefix: Of the corpus.
        given: The vocabulary that its ids have to be of.

    Returns:
        Whether there is a record.

    Raises:
        UserError: The record is of another vocabulary, or of other files, or damaged.
    """
    record = read_record(prefix, fix=given.ways())
    if record is None:
        return False
    _check_sizes(prefix, record)
    chosen = given_vocabulary(given)
    assert chosen is not None
    _refuse_difference(prefix, _recorded_vocabulary(prefix, record, given, is_used=False), chosen)
    return True


def _check_sizes(prefix: str, record: Record) -> None:
    for suffix, wanted in record.bytes.items():
        file = output_paths(Path(prefix))[suffix]
        if file.stat().st_size != wanted:
            raise UserError(
                f"{record.path}: tells of a {file.name} of {wanted} bytes, which has {file.stat().st_size}; make the "
                "corpus again, or remove that .json if the files are another one's"
            )


def _recorded_vocabulary(prefix: str, record: Record, given: VocabularyConfig, *, is_used: bool) -> Vocabulary:
    """Return the vocabulary in a record; where it `is_used`, its tokenizer has to be there, and the same."""
    spec = record.tokenizer
    found = Vocabulary(
        said_by=f"the record {record.path}",
        size=record.vocab_size,
        eod=record.eod,
        megatron_args=tuple(spec.megatron_args()),
        identity=record.identity,
    )
    if not is_used or spec.folder is None:
        return found
    if not Path(spec.folder).is_dir():
        raise UserError(
            f"{prefix}: was made with the tokenizer in {spec.folder}, which is not there; set {given.tokenizer_name} "
            "to its folder"
        )
    if spec.fingerprint("the tokenizer") != record.identity["folder"]:
        today = of_tokenizer(spec, "the tokenizer", f"today's tokenizer {spec.folder}")
        _refuse_difference(prefix, found, today)
    return found


def _refuse_difference(prefix: str, recorded: Vocabulary, other: Vocabulary) -> None:
    if other.size is not None and recorded.size != other.size:
        what = f"has {other.size:,} ids"
    elif other.eod is not None and recorded.eod != other.eod:
        what = f"has another end of documents ({other.eod})"
    elif recorded.is_another(other):
        what = "is another one, whose ids are of other tokens"
    else:
        return
    raise UserError(
        f"{prefix}: was made with a vocabulary of {recorded.size:,} ids whose documents end with {recorded.eod} "
        f"({recorded.said_by}), but {other.said_by} {what}; give the one that it was made with, or none"
    )


def _largest_id(
    prefix: str, record: Record | None, known: Vocabulary | None, tell: Callable[[str], None]
) -> int | None:
    """Return the largest id of a corpus, which is in the vocabulary, and whose record is of these very files."""
    size = None if known is None else known.size
    if record is None and size is None:
        return None
    possible = has_no_larger_id(prefix, below=size) if record is None and size is not None else None
    if possible is not None:
        return possible
    found = read_contents(prefix, tell=tell)
    if record is not None:
        # Those of before the digest was written down have the largest id, or nothing.
        same = record.digest == found.digest if record.digest else record.largest_id in (None, found.largest_id)
        if not same:
            raise UserError(
                f"{record.path}: tells of other tokens than {prefix}.bin and {prefix}.idx have, which are of the same "
                "size; make the corpus again, or remove that .json if the files are another one's"
            )
    if known is not None and size is not None and found.largest_id >= size:
        raise UserError(
            f"{prefix}: has the id {found.largest_id}, but {known.said_by} has {size:,} ids, 0 to {size - 1}; give the "
            "vocabulary that it was made with"
        )
    return found.largest_id


def _corpus(prefix: str, largest: int | None) -> Corpus:
    index = Path(f"{prefix}.idx")
    tokens = Path(f"{prefix}.bin").stat().st_size // token_type(index).itemsize
    return Corpus(prefix=prefix, sequences=check_index(index), tokens=tokens, largest_id=largest)
