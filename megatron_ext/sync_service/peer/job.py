# SPDX-License-Identifier: Apache-2.0
"""The processes of one peer, and how they do something together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron_ext.errors import UserError

__all__ = ["Job", "OneProcess", "Ranks"]

_T = TypeVar("_T")


class Job(Protocol):
    """The processes that speak for one peer. All of them call both methods in the same order."""

    def on_first(self, function: Callable[[], _T]) -> _T:
        """Call a function in the first process; all return its result, or end with what it has raised."""

    def on_all(self, function: Callable[[], _T]) -> list[_T]:
        """Call a function in every process; all return the results in order, or end with what the first one raised."""


class OneProcess:
    """A job of this process alone."""

    def on_first(self, function: Callable[[], _T]) -> _T:
        """See `Job`."""
        return function()

    def on_all(self, function: Callable[[], _T]) -> list[_T]:
        """See `Job`."""
        return [function()]


class Ranks:
    """The ranks of a process group; results have to be plain data."""

    def __init__(self, group: Any) -> None:
        """Take the group.

        Args:
            group: one that carries CPU objects, with a timeout that is longer than anything that is done together:
                while one rank waits for the server, the others wait for it.
        """
        self._group = group

    def on_first(self, function: Callable[[], _T]) -> _T:
        """See `Job`."""
        first = dist.get_process_group_ranks(self._group)[0]
        attempt = _Attempt(function) if dist.get_rank() == first else None
        answers = [attempt and attempt.answer]
        dist.broadcast_object_list(answers, src=first, group=self._group)
        result: _T = _results(answers, attempt)[0]
        return result

    def on_all(self, function: Callable[[], _T]) -> list[_T]:
        """See `Job`."""
        answers: list[Any] = [None] * dist.get_world_size(self._group)
        attempt = _Attempt(function)
        dist.all_gather_object(answers, attempt.answer, group=self._group)
        return _results(answers, attempt)


class _Attempt:
    """A function's result, or what it has raised, which must not end this rank before the others know of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.defect: Exception | None = None
        self.answer: tuple[Any, str | None]
        try:
            self.answer = function(), None
        except UserError as error:
            self.answer = None, str(error)
        # Nothing is swallowed: this rank raises it again when the others, which wait for an answer, have heard.
        except Exception as error:
            self.defect = error
            self.answer = None, f"rank {dist.get_rank()} has ended with {type(error).__name__}: {error}"


def _results(answers: list[Any], attempt: _Attempt | None) -> list[Any]:
    for _, message in answers:
        if message is not None:
            if attempt is not None and attempt.defect is not None:
                # Here it happened: with the way to it.
                raise attempt.defect
            raise UserError(message)
    return [result for result, _ in answers]
