# SPDX-License-Identifier: Apache-2.0
"""Weights that something else than training has replaced: rounds would continue from the anchor of others.

What the next step begins with is compared with what local SGD knows, by digests: once before the first step after
it began or after a state was loaded, and then only after the module was given weights by `load_state_dict`. No other
step costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.agreement import gather_at, refuse_together, workers_in_words
from megatron_ext.local_sgd.engine import SyncedTensor
from megatron_ext.local_sgd.plain_torch.inner_optimizers import has_history
from megatron_ext.local_sgd.plain_torch.module_hooks import Link, ModuleHook, remove_when_dropped
from megatron_ext.local_sgd.plain_torch.parameters import local_part
from megatron_ext.outer.digest import tensor_digest
from megatron_ext.phrases import plural

__all__ = ["ReplacedWeights"]

type _Digests = dict[str, tuple[int, int]]


class ReplacedWeights:
    """Notices weights that were replaced, before a step is made from them."""

    def __init__(
        self,
        synced: Sequence[SyncedTensor],
        *,
        model: torch.nn.Module | None,
        inner: torch.optim.Optimizer | None,
        across: Any,
        inside: Any,
        is_anchored: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """Take note of what is watched.

        Args:
            synced: what rounds move.
            model: the module, if it is known.
            inner: the inner optimizer, if it is known.
            across: process group of the ranks that hold the same values, one per worker, in worker order.
            inside: process group of all ranks of this worker; None when it is this one alone.
            is_anchored: returns whether there is an anchor; in warm-up workers are compared where it ends.
            say: prints a line.
        """
        normalized = set() if model is None else _normalized_by_themselves(model)
        self._watched = {entry.name: entry.tensor for entry in synced if entry.tensor.data_ptr() not in normalized}
        self._inner = inner
        self._across, self._inside = across, inside
        self._is_anchored = is_anchored
        self._say = say
        self._known: _Digests | None = None
        self._since: Literal["wrapped", "loaded", "running"] = "running"
        self._has_model, self._was_loaded = model is not None, False
        if model is not None:
            before = ModuleHook(Link(self), ReplacedWeights.before_load)
            handles = [
                module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]  # torch gives it no types
                for module in model.modules()
            ]
            remove_when_dropped(self, handles)

    def expect(self, since: Literal["wrapped", "loaded"]) -> None:
        """Compare with the present values before the next step.

        Args:
            since: what has just happened, on all ranks.
        """
        self._since, self._was_loaded = since, False
        self._known = self._digests() if self._is_anchored() else {}

    def before_load(self) -> None:
        """Compare with the present values before the next step: the module is about to be given others."""
        self._was_loaded = True
        if self._known is None and self._is_anchored():
            self._since = "running"
            self._known = self._digests()

    def forget(self) -> None:
        """Compare with nothing, because a step was made."""
        self._known = None

    def known(self) -> Mapping[str, tuple[int, int]]:
        """Return by name the digests of values that may have been replaced since; nothing of others."""
        return self._known or {}

    def check(self, take_anchor: Callable[[], None]) -> None:
        """Compare, if there is something to compare with; all ranks must call it before each step.

        Args:
            take_anchor: takes the present values as the anchor.

        Raises:
            UserError: weights were replaced, and there is none that all workers could begin from.
        """
        if self._known is None:
            return
        changed = {name: digest for name, digest in self._digests(self._known).items() if self._known[name] != digest}
        if self._since == "running":
            # Without the others, which are not told of it and continue to train.
            if changed:
                raise UserError(
                    f"the module was loaded with other weights in the middle of training ({_shown(list(changed))}), "
                    "and local SGD's anchor belongs to those before; load local SGD's state of the same save after "
                    "them (optimizer.load_state_dict), or wrap a new optimizer"
                )
        else:
            self._check_together(changed, take_anchor)
        self._known = None

    def settle(self, take_anchor: Callable[[], None]) -> None:
        """Begin from the present values before the first step, if they were replaced; all ranks must call it.

        Args:
            take_anchor: takes them as the anchor.

        Raises:
            UserError: the workers' differ.
        """
        if self._known is not None and self._since == "wrapped":
            self.check(take_anchor)
            self.expect("wrapped")

    def _check_together(self, changed: _Digests, take_anchor: Callable[[], None]) -> None:
        """Compare with the other ranks what was replaced before a first step."""
        own = []
        # A loop that clips weights before its steps has changed them as well, which is training.
        if changed and self._since == "loaded" and (self._was_loaded or not self._has_model):
            own.append(
                f"the module's weights were replaced after local SGD's state was loaded ({_shown(list(changed))}), "
                "which belongs to those before; load the module's weights first, then the state of the same save"
            )
        history = self._since == "wrapped" and self._inner is not None and has_history(self._inner)
        everyone = gather_at("the first step", (own, changed, history), self._across, self._inside)
        refuse_together([[each[0] for each in of_worker] for of_worker in everyone], own)
        if self._since == "wrapped":
            if _replaced_alike([[each[1] for each in of_worker] for of_worker in everyone]):
                take_anchor()
                self._say(
                    "the module's weights were replaced after the optimizer was wrapped, alike on all workers "
                    f"({_shown(list(changed))}); the first round begins from the present ones"
                )
            ranks = [each[2] for of_worker in everyone for each in of_worker]
            self._say_of_history([rank for rank, each in enumerate(ranks) if each], ranks, len(everyone[0]))

    def _say_of_history(self, holders: Sequence[int], ranks: Sequence[bool], shards: int) -> None:
        """Say it if inner optimizers have made steps that local SGD has not seen.

        Args:
            holders: the ranks where it is so.
            ranks: whether it is so, for all ranks by worker and rank of the worker.
            shards: ranks of a worker.
        """
        if holders:
            where = "" if all(ranks) else f" on {workers_in_words(holders, shards)}"
            self._say(
                f"the inner optimizer begins with a state of earlier steps{where}, and local SGD with none: its anchor "
                "is the present weights, its outer optimizer is new. If those steps had rounds, load local SGD's state "
                "of the same save as well"
            )

    def _digests(self, of: Mapping[str, Any] | None = None) -> _Digests:
        """Return by name digests of the present values, of all that is watched unless names are given."""
        return {name: tensor_digest([self._watched[name]]) for name in (self._watched if of is None else of)}


def _replaced_alike(everyone: Sequence[Sequence[_Digests]]) -> bool:
    """Return whether weights were replaced, by the same ones on all workers.

    Args:
        everyone: digests of what was replaced by name, by worker and rank of the worker.

    Raises:
        UserError: workers have different ones.
    """
    for of_shard in zip(*everyone, strict=True):
        names = dict.fromkeys(name for each in of_shard for name in each)
        different = [name for name in names if any(each.get(name) != of_shard[0].get(name) for each in of_shard)]
        if different:
            workers = [worker for worker, of_worker in enumerate(everyone) if any(of_worker)]
            raise UserError(
                f"weights were replaced after the optimizer was wrapped, on {workers_in_words(workers)}, and the "
                f"workers' differ now ({_shown(different)}); load the same weights on all workers, or, where they are "
                "of the middle of an interval, local SGD's state of the same save after them; where a first forward "
                "pass sets them from data, run one with the same data on all workers before wrapping"
            )
    return any(each for of_worker in everyone for each in of_worker)


def _shown(names: Sequence[str]) -> str:
    """Return names in a few words; there may be none on a rank of a worker."""
    if not names:
        return "of other ranks"
    return names[0] + (f" and {plural(len(names) - 1, 'more parameter')}" if len(names) > 1 else "")


def _normalized_by_themselves(model: torch.nn.Module) -> set[int]:
    """Return where the weights begin that a module changes in its own forward pass: of embeddings with `max_norm`."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = set()
    for module in model.modules():
        if isinstance(module, kinds) and module.max_norm is not None:
            found.add(local_part(module.weight).data_ptr())
    return found
