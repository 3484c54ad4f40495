# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, with the flags that make stock Megatron agree about the ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.optional import import_optional
from megatron_ext.errors import UserError

__all__ = [
    "BYTE_EOD",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "token_dtype",
    "tokens_digest",
]

BYTE_EOD = 256
"""End-of-document id of the byte-level tokenizer; ids 0 to 255 are the bytes themselves."""

_SAMPLE = (
    "Hello world, HELLO  World!\n\tdef main(argv: list[str]) -> int:\n        return 1234567 + 3.14e-5 # it's o'clock"
    "\r\n caf\u00e9 cafe\u0301 \uff21\u00df \u0130 stra\u00dfe \u4f60\u597d\u4e16\u754c "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f600\u200d "
)
"""Spaces, numbers, cases, accents and scripts: where tokenizers of the same tokens differ."""

_NOT_TOKENIZER_SUFFIXES = frozenset(
    {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
)


_IN_TOKENIZER_NAMES = ("token", "vocab", "merges", "spiece", "spm", "bpe", "tekken")
"""Some of these is in the name of every file that a tokenizer is read from."""
_LISTED_NAMES = 6


class Tokenizer(Protocol):
    """What the pipeline needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-document id included."""

    @property
    def eod(self) -> int:
        """Id that ends every document."""

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the ids of each text, without the end-of-document id, as 1-D integer arrays."""

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of `ids`; end-of-document ids are left out."""

    def digests(self) -> dict[str, str]:
        """Return texts that tell it from others: `tokens`, of its tokens and their ids, and what else there is."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Names a tokenizer; small enough to send to another process, which loads it itself."""

    folder: str | None = None
    """A Hugging Face tokenizer folder; None for the byte-level tokenizer."""

    trust_remote_code: bool = False
    """Whether Python code inside the folder may run."""

    def load(self, option: str = "--tokenizer", *, special_tokens: bool = True) -> Tokenizer:
        """Load the tokenizer.

        Args:
            option: What the user chooses it by, for messages.
            special_tokens: Whether what the tokenizer itself puts around a text is kept, as Megatron does.

        Raises:
            UserError: The folder is not a tokenizer, has no end-of-text token, or a package is missing.
        """
        if self.folder is None:
            return ByteTokenizer()
        return HuggingFaceTokenizer(
            Path(self.folder),
            trust_remote_code=self.trust_remote_code,
            option=option,
            special_tokens=special_tokens,
        )

    def megatron_args(self) -> list[str]:
        """Return the flags with which stock Megatron reads the same ids."""
        if self.folder is None:
            # NullTokenizer's end-of-document id is vocab_size - 1 and it has no padding id that a document
            # could contain, which is just what bytes need. Megatron's own ByteLevelTokenizer has another id
            # layout and is not among the choices of --tokenizer-type.
            return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_EOD + 1)]
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.folder]
        return [*flags, "--trust-remote-code"] if self.trust_remote_code else flags

    def fingerprint(self, option: str = "--tokenizer") -> str:
        """Return a text that changes when the ids may change; loads nothing.

        Args:
            option: What the user chooses it by, for messages.

        Raises:
            UserError: The folder is missing or unreadable.
        """
        if self.folder is None:
            return "bytes"
        return "sha256:" + _folder_digest(Path(self.folder), option)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, end of document 256. Needs no files and loses nothing."""

    vocab_size = BYTE_EOD + 1
    eod = BYTE_EOD

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return each text's UTF-8 bytes as 1-D uint16 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text; a character cut in half at either end becomes U+FFFD."""
        array = np.asarray(ids, dtype=np.int64)
        data: bytes = array[array != self.eod].astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")

    def digests(self) -> dict[str, str]:
        """Return the identity of the byte tokenizer."""
        return {"tokens": "bytes"}


class HuggingFaceTokenizer:
    """Any tokenizer folder that `transformers.AutoTokenizer` reads.

    The ids are those of Megatron's `--tokenizer-type HuggingFaceTokenizer`: special tokens that the
    tokenizer itself puts around a text (such as a BOS) are kept, the end-of-document id is its EOS token,
    or its SEP token where it has no EOS. Nothing is ever downloaded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trust_remote_code: bool = False,
        option: str = "--tokenizer",
        special_tokens: bool = True,
    ) -> None:
        """Load the tokenizer.

        Args:
            folder: Of the tokenizer.
            trust_remote_code: Whether Python code inside may run.
            option: What the user chooses it by, for messages.
            special_tokens: Whether `encode` keeps those that the tokenizer itself puts around a text.

        Raises:
            UserError: The folder is not a tokenizer, has no end-of-text token, or transformers is missing.
        """
        _folder_digest(folder, option)
        transformers: Any = import_optional("transformers", f"{option} {folder}")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        # The library raises whatever its loaders happen to raise for a damaged folder.
        except Exception as error:
            names = sorted(path.name for path in folder.iterdir())
            if not any(word in name for name in names for word in _IN_TOKENIZER_NAMES):
                held = ", ".join(names[:_LISTED_NAMES]) + (", ..." if len(names) > _LISTED_NAMES else "")
                raise UserError(
                    f"{option} {folder}: holds no tokenizer (tokenizer.json, tokenizer.model, vocab.txt, ...), but "
                    f"{held or 'nothing'}; give the folder that does"
                ) from error
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            raise UserError(f"{option} {folder}: cannot be loaded: {reason}") from error
        eod = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if eod is None:
            raise UserError(
                f"{option} {folder}: has no end-of-text token; set eos_token in tokenizer_config.json"
            )
        self.eod = int(eod)
        self.vocab_size = len(tokenizer)
        self._folder, self._option, self._special_tokens = folder, option, special_tokens
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return each text's ids as 1-D int64 arrays.

        Raises:
            UserError: The tokenizer yields an id at or above its own vocabulary size, for which the model
                would have no embedding.
        """
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=self._special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        arrays = [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]
        for array in arrays:
            if array.size and int(array.max()) >= self.vocab_size:
                raise UserError(
                    f"{self._option} {self._folder}: yields id {int(array.max())} although its vocabulary "
                    f"has {self.vocab_size} entries; its added tokens leave holes in the vocabulary"
                )
        return arrays

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of `ids` without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def digests(self) -> dict[str, str]:
        """Return its identity: its `tokens`, and the ids that it gives to a `sample` of texts.

        Both are the same with every release of the libraries, and whatever else lies in the folder.
        """
        tokens = self._tokenizer.get_vocab()
        names = sorted(tokens, key=lambda name: (tokens[name], name))
        # As texts, with the characters that stand for a space where a vocabulary is one of bytes or pieces.
        words = [name.replace("\u0120", " ").replace("\u2581", " ") for name in names]
        sample = [_SAMPLE, "".join(words[:: 1 + len(words) // 4096])]
        ids = self._tokenizer(sample, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        return {"tokens": tokens_digest(tokens), "sample": _digest([list(map(int, row)) for row in ids["input_ids"]])}


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of a token on disk, by the rule of Megatron's GPT dataset."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32


def tokens_digest(tokens: Mapping[str, int]) -> str:
    """Return a digest of a vocabulary's tokens and their ids, in whatever order they are listed."""
    return _digest(sorted(tokens.items()))


def _digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _folder_digest(folder: Path, option: str) -> str:
    """Return the SHA-256 over the names and contents of a tokenizer folder's files, weights left out."""
    if not folder.is_dir():
        raise UserError(
            f"{option} {folder}: not a folder; give a local folder with tokenizer.json or similar "
            "(names of a model hub are not looked up)"
        )
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if path.is_file() and path.suffix.lower() not in _NOT_TOKENIZER_SUFFIXES:
                content = path.read_bytes()
                digest.update(f"{path.name!a} {len(content)}\n".encode())
                digest.update(content)
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror} ({error.filename})") from error
    return digest.hexdigest()
