# SPDX-License-Identifier: Apache-2.0
"""What Megatron says of bad input by an error of any class, as one line for the user."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.errors import UserError
from megatron_ext.phrases import as_option

__all__ = ["refusals_in_one_line"]


@contextmanager
def refusals_in_one_line(place: str, it: str = "them") -> Iterator[None]:
    """Turn what Megatron says of bad input, by whatever error, into one line.

    Args:
        place: what was being checked.
        it: what stands for that in a sentence.

    Raises:
        UserError: in place of the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Megatron refuses arguments by errors of any class
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or _in_flags(_statement(at).removeprefix("assert "))
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        where = f"{os.path.basename(at.filename)}:{at.lineno}"
        raise UserError(f"{place}: Megatron refuses {it}: {kind}{text} ({where})") from error


def _statement(at: traceback.FrameSummary) -> str:
    """Return the statement that raised, which may go over several lines, without its comments."""
    first = at.lineno or 0
    lines = [linecache.getline(at.filename, line) for line in range(first, (at.end_lineno or first) + 1)]
    return " ".join(line.partition("#")[0].strip().removesuffix("\\").strip() for line in lines)


def _in_flags(condition: str) -> str:
    """Return what an assertion without words says, with the flags of the arguments that it looks at."""
    names = list(dict.fromkeys(re.findall(r"\bargs\.(\w+)", condition)))
    flags = ", ".join(as_option(name) for name in names)
    missing = re.fullmatch(r"args\.\w+ is not None,?", condition.strip())
    way_out = f"; give {flags}" if missing else f"; change {flags}" if flags else ""
    return f"{condition} does not hold{way_out}"
