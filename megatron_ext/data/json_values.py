# SPDX-License-Identifier: Apache-2.0
"""JSON values out of a file, one after the other: the elements of an array, or values with or without space between.

At most one value and one chunk of the file are in memory, whatever the file's length.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from megatron_ext.data.compression import DamagedData, Stream
from megatron_ext.data.documents import MAX_DOCUMENT_BYTES

__all__ = ["JSON_DECODER", "TOO_DEEP", "BadJson", "json_values"]

_CHUNK_BYTES = 1 << 20
TOO_DEEP = "arrays or objects lie too deep inside each other"
"""The end of a message about a record."""

_SPACE = " \t\r\n"
_CUT_CHARACTERS = 16
"""An error so near to the end of what was read may come from the cut alone, as in the middle of `\\ud83d\\ude00`."""

JSON_DECODER = json.JSONDecoder(parse_int=float)
"""Reads records, of which texts alone are looked at: a number may have more digits than Python makes integers of."""


class BadJson(Exception):
    """Where and why a file cannot be read on; the text is what a message says after the file's name and record."""


def json_values(stream: Stream, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[str, Any]]:
    """Yield the source text and the value of each record.

    Args:
        stream: UTF-8, with a byte order mark or without. One that begins with `[` is one array of records.
        most_bytes: Longest record.

    Raises:
        BadJson: The next record cannot be read; those before it have been yielded.
        DamagedData: So it is, because compressed data cannot be read on.
    """
    text = _Window(stream, most_bytes)
    if text.next_character() != "[":
        while text.next_character():
            yield text.take_value()
        return
    text.skip()
    first = True
    while text.next_character() != "]":
        if not first:
            text.take(",")
        elif not text.next_character():
            raise BadJson("the array has no end; the file is truncated")
        yield text.take_value()
        first = False
    text.skip()
    if text.next_character():
        raise BadJson(f"not JSON: {text.place()} comes something after the end of the array")


class _Window:
    """The part of a file that is being looked at."""

    def __init__(self, stream: Stream, most_bytes: int) -> None:
        self._stream = stream
        self._most = most_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._before = 0  # characters of the file before `_text`
        self._bytes = 0
        self._ended = False
        self._failure: DamagedData | None = None
        if self.next_character() == "\ufeff":
            self.skip()

    def next_character(self) -> str:
        """Pass over white space and return the character after it; nothing at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_on()

    def skip(self) -> None:
        """Pass over one character."""
        self._at += 1

    def take(self, wanted: str) -> None:
        """Pass over a character that has to be there."""
        found = self.next_character()
        if not found:
            raise BadJson(f"a {wanted!r} or the end of the array is missing; the file is truncated")
        if found != wanted:
            raise BadJson(f"not JSON: {self.place()} is {found!r} where {wanted!r} is expected")
        self.skip()

    def place(self) -> str:
        """Return where the next character is."""
        return f"at character {self._before + self._at + 1}"

    def take_value(self) -> tuple[str, Any]:
        """Pass over a value and return its text and itself."""
        self.next_character()
        while True:
            try:
                value, end = JSON_DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _CUT_CHARACTERS
                if self._ended or not cut:
                    place = self._before + error.pos + 1
                    raise BadJson(f"not JSON: {error.msg.removesuffix(' at')} at character {place}") from error
            except RecursionError as error:
                raise BadJson(f"not usable JSON: {TOO_DEEP}") from error
            else:
                # A number near the end of what was read may be the beginning of a longer one.
                if end + _CUT_CHARACTERS <= len(self._text) or self._ended:
                    source = self._text[self._at : end]
                    self._at = end
                    return source, value
            if len(self._text) - self._at > self._most:
                raise BadJson(f"the record is longer than {self._most} bytes, too long for one document; split it")
            self._read_on()

    def _read_on(self) -> None:
        """Drop what was passed over and read at least as much as is left, which keeps long values from many parses."""
        self._before += self._at
        self._text = self._text[self._at :]
        self._at = 0
        data = self._read(max(_CHUNK_BYTES, len(self._text)))
        self._ended = not data
        try:
            self._text += self._utf8.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            pending = len(error.object) - len(data)
            offset = self._bytes - pending + error.start
            found = error.object[error.start]
            raise BadJson(f"not valid UTF-8: byte 0x{found:02x} at offset {offset} of the file") from error
        self._bytes += len(data)

    def _read(self, wanted: int) -> bytes:
        """Return that many bytes, fewer at the end or where data turn unreadable, which the next call reports."""
        if self._failure is not None:
            raise self._failure
        pieces: list[bytes] = []
        while wanted > 0:
            try:
                piece = self._stream.read1(wanted)
            except DamagedData as error:
                if not pieces:
                    raise
                self._failure = error
                break
            if not piece:
                break
            pieces.append(piece)
            wanted -= len(piece)
        return b"".join(pieces)
