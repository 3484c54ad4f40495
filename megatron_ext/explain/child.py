# SPDX-License-Identifier: Apache-2.0
"""A function in a process of its own: Megatron keeps one rank's groups and arguments per process."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["ChildAnswer", "in_child"]

_OWN_LINE = "> megatron_ext: "


@dataclass(kw_only=True)
class ChildAnswer:
    """What a child found out."""

    value: Any = None
    """What the function returned."""

    refusal: str | None = None
    """The message of a `UserError`."""

    failure: str | None = None
    """The traceback of another error."""

    lines: list[str] = field(default_factory=list)
    """What this package printed meanwhile, as on the first rank of a run."""


def in_child(function: Callable[..., Any], *arguments: Any) -> ChildAnswer:
    """Run a function in a fork of this process, without its output.

    Raises:
        UserError: the function refused something of the user's.
        RuntimeError: it failed, or its process died.
    """
    context = multiprocessing.get_context("fork")
    own, of_child = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(of_child, function, arguments))
    process.start()
    of_child.close()
    try:
        answer: ChildAnswer = own.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that builds a rank ended with status {process.exitcode}") from None
    finally:
        own.close()
        if process.is_alive():
            process.join()
    if answer.refusal is not None:
        raise UserError(answer.refusal)
    if answer.failure is not None:
        raise RuntimeError(f"a rank cannot be built:\n{answer.failure}")
    return answer


def _run(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answer = ChildAnswer()
    logging.disable()
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        try:
            answer.value = function(*arguments)
        except UserError as error:
            answer.refusal = str(error)
        except BaseException:  # whatever it is, the parent raises it
            answer.failure = traceback.format_exc()
    lines = printed.getvalue().splitlines()
    answer.lines = [line.removeprefix(_OWN_LINE) for line in lines if line.startswith(_OWN_LINE)]
    pipe.send(answer)
    pipe.close()
