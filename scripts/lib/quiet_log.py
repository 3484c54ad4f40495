# SPDX-License-Identifier: Apache-2.0
"""Shows a training log without the noise of Megatron and torch, and keeps all of it in a file.

    training > >(python quiet_log.py FILE)

What is left out is listed here, line for line; whatever is not is shown, so that nothing new is ever hidden. Where the
package has said why a training ends (`megatron-ext: error:`), what torchrun adds about it is left out as well: that
sentence is the last one. It ends with the training, not before: interrupts are for that.
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
    r"W\d{4} .*torch/distributed/run\.py:\d+\] *\**$",
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
    r"Evaluating (on \d+ samples|iter \d+/\d+)$",
)
"""Beginnings of single lines that are left out."""

ERROR = r"megatron-ext: error: "
"""Begins the sentence that says why a training ends; each rank may say it."""

AFTER_ERROR = r"([EWI]\d{4} .*torch/distributed/elastic/|W\d{4} .*torch/distributed/run\.py)"
"""Begins a line in which torchrun says that a process has ended."""

TRACEBACK = r"Traceback \(most recent call last\):"
TORCHRUN = r'  File ".*/(torchrun|torch/distributed/run\.py)", line '
"""Begin a traceback, and its second line where it is torchrun's own."""

CHILD_FAILED = r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError: *$"
"""The last line of torchrun's traceback where it says that a process has failed; others are about torchrun itself."""

RULE = r"={20,}$"
"""The first and last line of the summary that comes after it."""

WARNING = r"\S+:\d+: (User|Future|Deprecation)Warning: "
"""Begins a warning of Python, whose next line may be the source that warns."""

_ERROR, _AFTER_ERROR, _TRACEBACK = re.compile(ERROR), re.compile(AFTER_ERROR), re.compile(TRACEBACK)
_TORCHRUN, _CHILD_FAILED, _RULE = re.compile(TORCHRUN), re.compile(CHILD_FAILED), re.compile(RULE)
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


def without_summary(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines but those that torchrun adds after an error of the package."""
    told = False
    lines = iter(lines)
    for line in lines:
        told = told or _ERROR.match(line) is not None
        if not told or not (_AFTER_ERROR.match(line) or _TRACEBACK.match(line)):
            yield line
        elif _TRACEBACK.match(line):
            yield from _unless_torchruns(line, lines)


def _unless_torchruns(first: str, lines: Iterator[str]) -> Iterator[str]:
    """Yield a traceback, unless it is torchrun's about a process that has failed, which a summary follows."""
    held = [first]
    for line in lines:
        held.append(line)
        if len(held) == 2 and not _TORCHRUN.match(line):
            break
        if line[:1] != " ":
            if _CHILD_FAILED.match(line):
                rules = 0
                while rules < 2 and (after := next(lines, None)) is not None:
                    rules += _RULE.match(after) is not None
                return
            break
    yield from held


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
    lines = open(0, encoding="utf-8", errors="surrogateescape", newline="\n")  # noqa: SIM115  # till the end
    with open(name, "ab", buffering=0) as file, open(1, "wb", buffering=0) as output:
        log, shown = _Sink(file, name), _Sink(output, "standard output")
        for line in without_summary(quiet(_kept(lines, log))):
            shown.write(line)


if __name__ == "__main__":
    main()
