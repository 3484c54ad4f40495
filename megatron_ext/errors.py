# SPDX-License-Identifier: Apache-2.0
"""The one error that the user, not the program, can put right."""

from __future__ import annotations

import os
import sys
import time

__all__ = ["UserError", "combine", "report"]

# How long a process waits for the first one of its node to say the same. The launcher ends the whole job at the first
# exit: earlier it would cut off the one that prints; and who is still there afterwards is alone with the error.
_GRACE_SECONDS = 2.0


class UserError(Exception):
    """Something the user gave is wrong: a flag, a file, a checkpoint, an installation.

    The message is one clear text that names the field or file and says what to change. The command line
    prints it as `megatron-ext: error: ...` without a traceback and exits with status 2.
    """


def combine(problems: list[str], heading: str) -> UserError:
    """Return one error that lists every problem under `heading`.

    Args:
        problems: at least one sentence, each naming a field and its fix.
        heading: what was being checked.
    """
    if len(problems) == 1:
        return UserError(f"{heading}: {problems[0]}")
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return UserError(f"{heading}: {len(problems)} problems\n{lines}")


def report(error: UserError) -> None:
    """Print `error` without a traceback, once per node where all ranks have it, and from its rank where one has it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"megatron-ext: error: {error}", file=sys.stderr, flush=True)
        return
    time.sleep(_GRACE_SECONDS)
    print(f"megatron-ext: error on rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr, flush=True)
