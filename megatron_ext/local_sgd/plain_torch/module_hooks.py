# SPDX-License-Identifier: Apache-2.0
"""Hooks that a module may outlive: they keep nobody alive, and a module's copies and pickles are without them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["Link", "ModuleHook", "remove_when_dropped"]


class Link[Owner]:
    """How a module's hooks reach whom they belong to, who lives on for a module's sake only while it says so."""

    def __init__(self, owner: Owner) -> None:
        """Know the owner, without keeping it alive."""
        self._known = weakref.ref(owner)
        self._kept: Owner | None = None

    @property
    def owner(self) -> Owner | None:
        """The owner, unless it is gone."""
        return self._known()

    def keep(self) -> None:
        """Keep the owner alive as long as the module is: it has something to do for it yet."""
        self._kept = self._known()

    def let_go(self) -> None:
        """Keep it alive no longer."""
        self._kept = None


class ModuleHook[Owner]:
    """Calls an owner whenever a module calls it, with whatever arguments, and answers nothing.

    A copy of the module, as for a moving average, has a hook that does nothing. So has one that was pickled, which
    is read without this package.
    """

    __slots__ = ("_act", "_before_copies", "_link")

    def __init__(
        self, link: Link[Owner], act: Callable[[Owner], None], before_copies: Callable[[Owner], None] | None = None
    ) -> None:
        """Prepare; a module has still to register it.

        Args:
            link: leads to the owner.
            act: what to do then.
            before_copies: what to do before the module is copied or pickled, as to refuse it.
        """
        self._link, self._act, self._before_copies = link, act, before_copies

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def __call__(self, *_: Any) -> None:
        """Call the owner, unless it is gone."""
        owner = self._link.owner
        if owner is not None:
            self._act(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        make, args = self.__reduce__()
        nothing: Callable[..., None] = make(*args)
        return nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        owner = self._link.owner
        if owner is not None and self._before_copies is not None:
            self._before_copies(owner)
        # Of Python's own library alone: it takes whatever arguments, and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


def remove_when_dropped(owner: object, handles: Sequence[RemovableHandle]) -> None:
    """Take hooks off their modules when their owner is gone.

    Args:
        owner: whose hooks they are; not kept alive.
        handles: what registering them returned.
    """
    weakref.finalize(owner, _remove, handles)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
