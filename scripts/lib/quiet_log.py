# SPDX-License-Identifier: Apache-2.0
"""Shows a training log without the noise of Megatron and torch, and keeps all of it in a file.

    training > >(python quiet_log.py FILE)

What is left out is listed here, line for line; whatever is not is shown, so that nothing new is ever hidden. It ends
with the training, not before: interrupts are for that.
"""

import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO

BLOCKS = (
    (r"-+ arguments -+$", r"-+ end of arguments -+$"),
    (r"Number of parameters in transformer block in billions", r"Theoretical memory footprints:"),
    (r" > datasets target sizes", r" +test: "),
)
"""First and last lines of what is left out whole."""

LINES = (
    r"$",
    r"WARNING: ?(megatron\.|one_logger)",
    r"[IW]\d{4} .*(No CUDA runtime is found|OMP_NUM_THREADS)",
    r"\[(after|before) .*\] datetime: ",
    r"\[Rank \d+\] \((after|before) .*memory \(MB\)",
    r"using (world size|torch\.\S+ for parameters)",
    r"Number of virtual stages per pipeline stage: None",
    r"> (initializing|initialized|setting random|compiling|building) ",
    r"> *padded vocab ",
    r" > number of parameters on ",
    r">>> done with ",
    r"time to initialize megatron",
    r"done with setup",
    r"training \.\.\.",
    r"usage: \S+\.py \[-h\]",
    r" {12,}[\[{]",
    r"Overwriting rerun_state_machine",
)
"""Beginnings of single lines that are left out."""

WARNING = r"\S+:\d+: (User|Future|Deprecation)Warning: "
"""Begins a warning of Python, whose next line may be the source that warns."""

_WARNING, _SOURCE = re.compile(WARNING), re.compile(r"  \S")
_FIRST, _LAST = (re.compile("|".join(f"(?:{pattern})" for pattern in each)) for each in zip(*BLOCKS, strict=True))
_LINE = re.compile("|".join(f"(?:{pattern})" for pattern in LINES))


def quiet(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not noise."""
    in_block = after_warning = False
    for line in lines:
        is_source, after_warning = after_warning and _SOURCE.match(line) is not None, False
        if in_block:
            in_block = _LAST.match(line) is None
        elif _FIRST.match(line):
            in_block = True
        elif _WARNING.match(line):
            after_warning = True
        elif not is_source and not _LINE.match(line):
            yield line


class _Sink:
    """Text that is written as long as that works: a full disk or a closed terminal does not end a training."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._works = True

    def write(self, line: str) -> None:
        """Write a line."""
        if not self._works:
            return
        try:
            self._file.write(line.encode(errors="surrogateescape"))
        except OSError as error:
            self._works = False
            with suppress(OSError):
                print(f"quiet_log.py: {self._name}: {error.strerror}; nothing more is written there", file=sys.stderr)


def _kept(lines: Iterable[str], log: _Sink) -> Iterator[str]:
    """Write every line to a log, and yield it."""
    for line in lines:
        log.write(line)
        yield line


def main() -> None:
    """Filter the standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = sys.argv[1]
    lines = open(0, encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115
    with open(name, "ab", buffering=0) as file, open(1, "wb", buffering=0) as output:
        log, shown = _Sink(file, name), _Sink(output, "standard output")
        for line in quiet(_kept(lines, log)):
            shown.write(line)


if __name__ == "__main__":
    main()
