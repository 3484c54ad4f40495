# SPDX-License-Identifier: Apache-2.0
"""The one error that the user, not the program, can put right."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["UserError", "combine", "in_one_line", "report", "said_elsewhere"]

# How long a process waits for the first one of its node to say the same. The launcher ends the whole job at the first
# exit: earlier it would cut off the one that prints; and who is still there afterwards is alone with the error.
_GRACE_SECONDS = 2.0
_SAID = "megatron_ext/error"

ExceptHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], Any]
"""What Python calls with an exception that ends the process."""


class UserError(Exception):
    """Something the user gave is wrong: a flag, a file, a checkpoint, an installation.

    The message is one clear text that names the field or file and says what to change. The command line
    prints it as `megatron-ext: error: ...` without a traceback and exits with status 2.
    """


def combine(problems: list[str], heading: str) -> UserError:
    """Return one error that lists every problem under `heading`.

    Args:
        problems: at least one sentence, each naming a field and its fix; what is said twice is listed once.
        heading: what was being checked.
    """
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return UserError(f"{heading}: {problems[0]}")
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return UserError(f"{heading}: {len(problems)} problems\n{lines}")


def in_one_line(original: ExceptHook) -> ExceptHook:
    """Wrap `sys.excepthook`: a mistake of the user's is shown as one message instead of a traceback per rank."""

    @functools.wraps(original)
    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if isinstance(value, UserError):
            report(value)
        elif said_elsewhere():
            # Its own trouble is that the ranks are gone which have the error.
            line = f"megatron-ext: a rank ends after the error above ({kind.__name__})"
            print(line, file=sys.stderr, flush=True)
        else:
            original(kind, value, trace)

    return excepthook


def report(error: UserError) -> None:
    """Print `error` without a traceback: once per job where its ranks know each other, once per node where not yet."""
    store = _store()
    if store is not None:
        # The first rank's log is where people look.
        end = time.monotonic() + (0.0 if os.environ.get("RANK") == "0" else _GRACE_SECONDS)
        while time.monotonic() < end and not store.check([_SAID]):
            time.sleep(0.1)
        if store.add(_SAID, 1) == 1:
            _print("error", error)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _print("error", error)
    else:
        time.sleep(_GRACE_SECONDS)
        _print(f"error on rank {os.environ.get('RANK', '?')}", error)


def said_elsewhere() -> bool:
    """Return whether a rank of this job has reported an error of the user's."""
    store = _store()
    return store is not None and bool(store.check([_SAID]))


def _print(heading: str, error: UserError) -> None:
    print(f"megatron-ext: {heading}: {error}", file=sys.stderr, flush=True)


def _store() -> Any:
    """Return the store through which the ranks of this job know each other; None before there is one, or after."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        store.check([_SAID])
    except RuntimeError:  # the rank that kept it is gone
        return None
    return store
