# SPDX-License-Identifier: Apache-2.0
"""What all quickstarts do around their runs: one line for an error, an orderly end, a folder that is theirs."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stages import StageError

__all__ = ["claim", "exit_status", "interrupt"]


def exit_status(run: Callable[[], int]) -> int:
    """Run a quickstart.

    Args:
        run: returns its exit status; raises ValueError for bad options, StageError for a stage that failed.

    Returns:
        What `run` returned; 1 when a stage failed, 2 for bad options, 130 on Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return run()
    except ValueError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    except StageError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted, nothing is left running", file=sys.stderr)
        return 130


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Treat a request to end like Ctrl-C."""
    raise KeyboardInterrupt


def claim(output: Path, marker: str) -> None:
    """Make the output folder, and say by a file in it that it is a quickstart's, so that the next one may replace it.

    Args:
        output: new, empty, or an earlier output of the same quickstart.
        marker: name of the file, one for each quickstart.

    Raises:
        ValueError: it is something else, or cannot be written.
    """
    ours = (output / marker).exists() if output.is_dir() else not output.exists()
    if not ours and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--output {output} is something else than a quickstart's output; give a new folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / marker).touch()
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written: {error.strerror}; give another folder") from error
