# SPDX-License-Identifier: Apache-2.0
"""The catalog of a run: which tensors its peers have in common, and who trains which."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal

__all__ = ["LONGEST_NAME", "MOST_AXES", "Catalog", "TensorSpec", "catalog_of", "tensor_messages"]

RESERVED = "outer:"
"""Begins the names of the outer optimizer's states in a snapshot."""

MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 1 << 40
MOST_AXES = 16
LONGEST_NAME = 1000
"""Letters of the name of a tensor or unit, or of what else others give names to."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model; the service keeps its values as fp32."""

    name: str
    """Global name."""

    shape: tuple[int, ...]
    """Global shape."""

    unit: str = ""
    """What is judged as a whole, such as a layer."""

    owners: tuple[int, ...] = ()
    """Indices of the peers that train it; all of them when empty."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def judged_as(self) -> tuple[str, bool]:
        """What the guards of a round judge it with: a unit, or itself, and whether only its owners train it."""
        return self.unit or self.name, bool(self.owners)

    @property
    def judged_title(self) -> str:
        """What they call that."""
        unit, is_owned = self.judged_as
        return f"{unit} (its own experts)" if is_owned else unit

    def is_trained_by(self, index: int) -> bool:
        """Whether the peer of this index contributes to the tensor."""
        return not self.owners or index in self.owners


class Catalog:
    """The tensors of a run in their order, which is also the order of everything that is done with them."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Take the tensors.

        Raises:
            Refusal: there are none, or a name, shape or owner cannot be used.
        """
        self.specs = tuple(specs)
        self._by_name = {spec.name: spec for spec in self.specs}
        if not 0 < len(self.specs) <= MAX_TENSORS:
            raise Refusal("invalid", f"the catalog has {len(self.specs)} tensors; 1 to {MAX_TENSORS} are possible")
        if len(self._by_name) != len(self.specs):
            twice = next(name for name, times in Counter(spec.name for spec in self.specs).items() if times > 1)
            raise Refusal("invalid", f"tensor {twice!r} is twice in the catalog; give every tensor a name of its own")
        for spec in self.specs:
            if not spec.name or spec.name == "__metadata__" or spec.name.startswith(RESERVED):
                raise Refusal("invalid", f"{spec.name!r} cannot be the name of a tensor; choose another one")
            for what, title in (("name", spec.name), ("unit", spec.unit)):
                if len(title) > LONGEST_NAME or not title.isprintable():
                    raise Refusal(
                        "invalid",
                        f"{what} {title[:100]!r} of a tensor must be at most {LONGEST_NAME} letters that can be "
                        "printed; choose another one",
                    )
            if len(spec.shape) > MOST_AXES:
                axes = len(spec.shape)
                raise Refusal("invalid", f"tensor {spec.name!r} has {axes} axes; at most {MOST_AXES} are possible")
            if not 0 < spec.numel <= MAX_ELEMENTS or min(spec.shape, default=1) < 1:
                raise Refusal("invalid", f"tensor {spec.name!r} has the shape {spec.shape}; it must hold elements")
            if list(spec.owners) != sorted(set(spec.owners)):
                raise Refusal("invalid", f"tensor {spec.name!r} has the owners {spec.owners}; give each once, in order")

    @classmethod
    def of_tensors(cls, values: Mapping[str, torch.Tensor]) -> Catalog:
        """Return the catalog of tensors that all peers train, each a unit of its own."""
        return cls(TensorSpec(name=name, shape=tuple(value.shape), unit=name) for name, value in values.items())

    @classmethod
    def from_json(cls, entries: Sequence[dict[str, Any]]) -> Catalog:
        """Return the catalog that `as_json` described."""
        return cls(
            TensorSpec(**{**entry, "shape": tuple(entry["shape"]), "owners": tuple(entry["owners"])})
            for entry in entries
        )

    def as_json(self) -> list[dict[str, Any]]:
        """Return plain data."""
        return [asdict(spec) for spec in self.specs]

    def __getitem__(self, name: str) -> TensorSpec:
        """Return the tensor of a name.

        Raises:
            Refusal: there is none.
        """
        if name not in self._by_name:
            raise Refusal("invalid", f"tensor {name!r} is not in the catalog of the run")
        return self._by_name[name]

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return 4 * sum(spec.numel for spec in self.specs)

    def difference(self, other: Catalog) -> str | None:
        """Return the first thing in which `other` differs, None when it is the same."""
        for mine, theirs in zip(self.specs, other.specs, strict=False):
            if mine.name != theirs.name:
                return f"tensor {mine.name!r} has {theirs.name!r} in its place"
            for field in ("shape", "unit", "owners"):
                if getattr(mine, field) != getattr(theirs, field):
                    found, wanted = getattr(theirs, field), getattr(mine, field)
                    return f"{field} of tensor {mine.name!r} is {found} instead of {wanted}"
        if len(self) != len(other):
            return f"it has {len(other)} tensors instead of {len(self)}"
        return None


def tensor_messages(catalog: Catalog) -> list[Any]:
    """Return the protocol's messages of the tensors."""
    return [pb2.TensorSpec(**asdict(spec)) for spec in catalog]


def catalog_of(messages: Iterable[Any]) -> Catalog:
    """Return the catalog that `tensor_messages` described.

    Raises:
        Refusal: there is none.
    """
    return Catalog(
        TensorSpec(name=spec.name, shape=tuple(spec.shape), unit=spec.unit, owners=tuple(spec.owners))
        for spec in messages
    )
