# SPDX-License-Identifier: Apache-2.0
"""Rounds that end in a module's next forward pass: every layer waits for its own part, where it is called.

A layer is a submodule whose path ends in a number, as in a ModuleList or a Sequential. Whatever is in no layer may be
used anywhere, so all of that is awaited where the forward pass begins. Parts always arrive in one order, the same on
all workers, however far each of them has come: their messages could not be told apart otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.plain_torch.module_hooks import Link, ModuleHook, remove_when_dropped
from megatron_ext.local_sgd.plain_torch.parameters import local_part, unit_of

__all__ = ["ForwardHooks", "layers_of"]

_WAY_OUT = "call averager.end_round() on all ranks before, or drop sync_in_forward"


def layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return by unit the layers of a module of which nothing is used before they are called, as far as that shows.

    What FSDP gathers together with parameters outside a layer is used before that, and what other modules have as
    well may be.
    """
    gathering = {
        path: id(module._get_fsdp_state())  # several modules that are sharded as one share it
        for path, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for unit in dict.fromkeys(unit_of(name) for name, _ in model.named_parameters()):
        if not unit.rpartition(".")[2].isdigit():
            continue
        layer = model.get_submodule(unit)
        is_called = type(layer).forward is not torch.nn.Module.forward
        is_alone = all(
            name.startswith(f"{unit}.") for parameter in layer.parameters() for name in names[id(parameter)]
        )
        if is_called and is_alone and _is_gathered_apart(unit, layer, gathering):
            found[unit] = layer
    return found


def _is_gathered_apart(unit: str, layer: torch.nn.Module, gathering: dict[str, int]) -> bool:
    """Return whether FSDP, where it shards a layer, gathers it by itself.

    Args:
        unit: the layer's path.
        layer: the layer.
        gathering: by path of the modules that gather, which of them gather together.
    """
    outside = {state for path, state in gathering.items() if path != unit and not path.startswith(f"{unit}.")}
    for name, _ in layer.named_parameters(prefix=unit):
        around = [path for path in gathering if not path or name.startswith(f"{path}.")]
        if around and gathering[max(around, key=len)] in outside:
            return False
    return True


class ForwardHooks:
    """Lets the layers of a module run only when the round in flight has brought their parameters."""

    _in_flight: ClassVar[dict[int, weakref.ref[ForwardHooks]]] = {}
    """By process group, whose round is in flight there: messages of two rounds could not be told apart."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[str],
        layers: Mapping[str, torch.nn.Module],
        land: Callable[[Sequence[str]], None],
        group: Any,
    ) -> None:
        """Register the hooks; nothing is awaited yet.

        Args:
            model: whose forward passes are training's.
            units: everything that a round brings: first what is in no layer, then the layers in order.
            layers: what `layers_of` found.
            land: waits until the results of units are among the parameters.
            group: process group over which they come.
        """
        self._model = model
        self._units = tuple(units)
        self._land = land
        self._group = group
        self._parameters = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        self._sharded = self._count_sharded()
        self._landed = len(self._units)
        """How many units have arrived."""
        self._open = self._entered = False
        self._uncalled: set[str] = set()
        self._versions: list[int] = []
        self._gradients: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Layers without a trained parameter get nothing.
        layers = {unit: layer for unit, layer in layers.items() if unit in self._units}
        self._first_layer = next((index for index, unit in enumerate(units) if unit in layers), len(self._units))
        self._link = Link(self)
        handles = [
            # Before the hooks of FSDP, which gather.
            layer.register_forward_pre_hook(self._hook(_entering(unit)), prepend=True)
            for unit, layer in layers.items()
        ]
        within = {id(module) for layer in layers.values() for module in layer.modules()}
        self._gathers = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
        not_now = self._hook(ForwardHooks.refuse_to_be_read)
        for module in model.modules():
            handles += [
                module.register_state_dict_pre_hook(not_now),  # type: ignore[no-untyped-call]  # torch gives it no types
                module.register_load_state_dict_pre_hook(not_now),  # type: ignore[no-untyped-call]  # as above
            ]
            if id(module) not in within:
                handles.append(module.register_forward_pre_hook(self._hook(ForwardHooks.enter), prepend=True))
        remove_when_dropped(self, handles)

    def _hook(self, act: Callable[[ForwardHooks], None]) -> ModuleHook[ForwardHooks]:
        """Return a hook; a copy of the module takes part in no rounds, and is not made of what is in flight."""
        return ModuleHook(self._link, act, ForwardHooks.refuse_to_be_read)

    @property
    def open(self) -> bool:
        """Whether there is a round that nobody has closed."""
        return self._open

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return self._landed == len(self._units)

    def expect(self) -> None:
        """Take note that a round has been launched: no parameter may be used as it is.

        Raises:
            UserError: FSDP was told to gather layers before they are called, or another round is in flight.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._states_to_forward_prefetch:
                raise UserError(
                    "set_modules_to_forward_prefetch gathers layers before a round has brought them; leave it away, or "
                    "drop sync_in_forward"
                )
        known = self._in_flight.get(id(self._group))
        other = None if known is None else known()
        if other is not None and other is not self and other.open:
            raise UserError(
                "sync_in_forward: rounds of two averagers are in flight in one process group; give each a group of "
                "its own (dist.new_group()), or drop it"
            )
        self._in_flight[id(self._group)] = weakref.ref(self)
        self._link.keep()  # without it the module would never be given what is in flight
        self._open, self._entered, self._landed = True, False, 0
        self._uncalled = set(self._units)
        self._versions = self._current_versions()
        self._gradients = {
            name: (weakref.ref(value.grad), value.grad._version)
            for name, value in self._parameters
            if value.grad is not None
        }

    @torch.no_grad()
    def land_all(self) -> None:
        """Wait for everything that has not arrived, before parameters are changed.

        Raises:
            UserError: they have been used before it arrived.
        """
        if self._open:
            self._refuse_early_use()
        self._land_until(len(self._units))

    def close(self) -> None:
        """Take note that the round has ended."""
        assert self.complete, "parameters are still in flight"
        self._open = False
        self._gradients = {}
        self._link.let_go()

    def enter(self) -> None:
        """Before anything outside the layers runs, all of that must be there.

        Raises:
            UserError: the first forward pass after a round keeps no gradients, so that other ranks may not make it, and
                this one would wait for them.
        """
        if not self._open:
            return
        if not self._entered and not torch.is_grad_enabled():
            raise UserError(f"a forward pass without gradients while a round is in flight: {_WAY_OUT}")
        self._entered = True
        self._uncalled.difference_update(self._units[: self._first_layer])
        self._land_until(self._first_layer)

    def enter_layer(self, unit: str) -> None:
        """Before a layer runs, its parameters must be there."""
        if self._open:
            self._uncalled.discard(unit)
            self._land_until(self._units.index(unit) + 1)

    def refuse_to_be_read(self) -> None:
        """Refuse to save, load or copy parameters.

        Raises:
            UserError: some are in flight.
        """
        if self._open and not self.complete:
            raise UserError(f"the module's state while a round is in flight: {_WAY_OUT}")

    def _refuse_changes(self) -> None:
        """Refuse parameters that were changed since the round was launched, or that FSDP has gathered."""
        versions = self._current_versions()
        for (name, _), before, now in zip(self._parameters, self._versions, versions, strict=True):
            if before != now:
                raise UserError(f"parameter {name} was changed while a round is in flight: {_WAY_OUT}")
        if self._count_sharded() != self._sharded:
            raise UserError(f"FSDP has gathered parameters (unshard()) while a round is in flight: {_WAY_OUT}")

    def _refuse_early_use(self) -> None:
        """Refuse gradients that came of parameters before they had arrived."""
        for name, value in self._parameters:
            if unit_of(name) in self._uncalled and self._has_new_gradient(name, value):
                raise UserError(
                    f"the backward pass has reached {name}, but its module was not called in the forward pass, so it "
                    "was used before the round had brought it; call modules themselves (and compile them after the "
                    "optimizer was wrapped), or drop sync_in_forward"
                )

    def _has_new_gradient(self, name: str, value: torch.Tensor) -> bool:
        """Return whether there was a backward pass to a parameter since the round was launched."""
        if value.grad is None:
            return False
        known, version = self._gradients.get(name, (None, 0))
        if known is None or known() is not value.grad:
            return True
        return version != value.grad._version and bool(local_part(value.grad).any())  # else zero_grad() was called

    def _current_versions(self) -> list[int]:
        return [local_part(value)._version for _, value in self._parameters]

    def _count_sharded(self) -> int:
        """Return how many of the module's parameters are shards now."""
        return sum(isinstance(value, DTensor) for value in self._model.parameters())

    def _land_until(self, count: int) -> None:
        """Wait for the first `count` units.

        Raises:
            UserError: parameters were changed or gathered before the first of them arrived.
        """
        if self._landed == 0 < count:
            self._refuse_changes()
        with torch.no_grad():
            while self._landed < count:
                self._land([self._units[self._landed]])
                self._landed += 1
        _let_gathering_wait(self._gathers)


def _let_gathering_wait(module: FSDPModule | None) -> None:
    """Let FSDP gather what has landed: its streams wait for the current one at the root's forward pass alone."""
    if module is None or not torch.cuda.is_available():
        return
    streams = module._get_fsdp_state()._comm_ctx
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        stream = getattr(streams, name, None)  # none before the first forward pass
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream())


def _entering(unit: str) -> Callable[[ForwardHooks], None]:
    return lambda hooks: hooks.enter_layer(unit)
