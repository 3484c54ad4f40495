# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, with the flags that make stock Megatron agree about the ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.optional import import_optional
from megatron_ext.errors import UserError

__all__ = ["BYTE_EOD", "ByteTokenizer", "HuggingFaceTokenizer", "Tokenizer", "TokenizerSpec", "token_dtype"]

BYTE_EOD = 256
"""End-of-document id of the byte-level tokenizer; ids 0 to 255 are the bytes themselves."""

_NOT_TOKENIZER_SUFFIXES = frozenset(
    {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
)


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


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Names a tokenizer; small enough to send to another process, which loads it itself."""

    folder: str | None = None
    """A Hugging Face tokenizer folder; None for the byte-level tokenizer."""

    trust_remote_code: bool = False
    """Whether Python code inside the folder may run."""

    def load(self) -> Tokenizer:
        """Load the tokenizer.

        Raises:
            UserError: The folder is no tokenizer, has no end-of-text token, or a package is missing.
        """
        if self.folder is None:
            return ByteTokenizer()
        return HuggingFaceTokenizer(Path(self.folder), trust_remote_code=self.trust_remote_code)

    def megatron_args(self) -> list[str]:
        """Return the flags with which stock Megatron reads the same ids."""
        if self.folder is None:
            # NullTokenizer's end-of-document id is vocab_size - 1 and it has no padding id that a document
            # could contain, which is just what bytes need. Megatron's own ByteLevelTokenizer has another id
            # layout and is not among the choices of --tokenizer-type.
            return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_EOD + 1)]
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", self.folder]
        return [*flags, "--trust-remote-code"] if self.trust_remote_code else flags

    def fingerprint(self) -> str:
        """Return a text that changes when the ids may change; loads nothing.

        Raises:
            UserError: The folder is missing or unreadable.
        """
        if self.folder is None:
            return "bytes"
        return "sha256:" + _folder_digest(Path(self.folder))


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


class HuggingFaceTokenizer:
    """Any tokenizer folder that `transformers.AutoTokenizer` reads.

    The ids are those of Megatron's `--tokenizer-type HuggingFaceTokenizer`: special tokens that the
    tokenizer itself puts around a text (such as a BOS) are kept, the end-of-document id is its EOS token,
    or its SEP token where it has no EOS. Nothing is ever downloaded.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Load the tokenizer.

        Raises:
            UserError: The folder is no tokenizer, has no end-of-text token, or transformers is missing.
        """
        _folder_digest(folder)
        transformers: Any = import_optional("transformers", f"--tokenizer {folder}")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
        # The library raises whatever its loaders happen to raise for a broken folder.
        except Exception as error:
            reason = " ".join(str(error).split())[:500] or type(error).__name__
            raise UserError(f"--tokenizer {folder}: cannot be loaded: {reason}") from error
        eod = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if eod is None:
            raise UserError(
                f"--tokenizer {folder}: has no end-of-text token; set eos_token in tokenizer_config.json"
            )
        self.eod = int(eod)
        self.vocab_size = len(tokenizer)
        self._folder = folder
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return each text's ids as 1-D int64 arrays.

        Raises:
            UserError: The tokenizer yields an id at or above its own vocabulary size, for which the model
                would have no embedding.
        """
        encoded = self._tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        arrays = [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]
        for array in arrays:
            if array.size and int(array.max()) >= self.vocab_size:
                raise UserError(
                    f"--tokenizer {self._folder}: yields id {int(array.max())} although its vocabulary "
                    f"has {self.vocab_size} entries; its added tokens leave holes in the vocabulary"
                )
        return arrays

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of `ids` without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of a token on disk, by the rule of Megatron's GPT dataset."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32


def _folder_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of a tokenizer folder's files, weights left out."""
    if not folder.is_dir():
        raise UserError(
            f"--tokenizer {folder}: not a folder; give a local folder with tokenizer.json or the like "
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
        raise UserError(f"--tokenizer {folder}: {error.strerror} ({error.filename})") from error
    return digest.hexdigest()
