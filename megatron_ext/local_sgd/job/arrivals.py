# SPDX-License-Identifier: Apache-2.0
"""Which units of the model a round that ends in the forward pass has still to bring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ext.local_sgd.engine import LocalSGD
    from megatron_ext.seams.optimizer import InnerValues

__all__ = ["Arrivals"]


class Arrivals:
    """Lets parameters be used only when the round in flight has brought them."""

    def __init__(self, engine: LocalSGD, values: InnerValues) -> None:
        """Prepare; nothing is awaited yet.

        Args:
            engine: begins and ends the rounds.
            values: the values that they change, and the model that is brought up to date with them.
        """
        self._engine = engine
        self._values = values
        self._unit_of = {id(entry.parameter): entry.unit for entry in values.view.entries}
        self._missing: set[str] = set()
        self._open = False

    @property
    def open(self) -> bool:
        """Whether there is a round that has not been concluded."""
        return self._open

    def expect(self) -> None:
        """Take note that a round has been launched: nothing of the model may be used as it is."""
        self._open, self._missing = True, set(self._unit_of.values())

    def require(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for what the round brings these parameters, and bring this rank's part of them up to date."""
        if not self._missing:
            return
        units = {self._unit_of[id(found)] for found in parameters if id(found) in self._unit_of} & self._missing
        if units:
            self._missing -= units
            self._engine.land(sorted(units))
            self._values.refresh_units(units)

    def close(self) -> bool:
        """Take note that the round is concluded; return whether everything had been required before."""
        complete = not self._missing
        self._open, self._missing = False, set()
        return complete
