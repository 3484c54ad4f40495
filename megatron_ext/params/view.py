# SPDX-License-Identifier: Apache-2.0
"""The parameter view of one running rank: its own tensors, told in global terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.params.boxes import Slice
from megatron_ext.params.gpt_shape import GptShape
from megatron_ext.params.layout import Coordinates, Layout
from megatron_ext.params.parameter_names import global_name
from megatron_ext.params.placement import Placed, Placement
from megatron_ext.params.tensors import GlobalTensor, ParamsError

NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalParameter:
    """One tensor of this rank and its place in the model."""

    name_local: str
    """Name within the model chunk, e.g. ``decoder.layers.0.mlp.linear_fc1.weight``."""

    chunk_index: int
    """Model chunk (virtual pipeline stage) that holds it, from 0."""

    parameter: torch.Tensor
    """The live tensor; a ``torch.nn.Parameter`` except in ``ParameterView.buffers``."""

    placed: Placed
    """Where the rank's part lies."""

    @property
    def tensor(self) -> GlobalTensor:
        """The global tensor it is a part of."""
        return self.placed.tensor

    @property
    def slice(self) -> Slice:
        """Which part of the global tensor it is."""
        return self.placed.slice

    @property
    def unit(self) -> str:
        """The unit it belongs to."""
        return self.placed.tensor.unit

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to a routed expert."""
        return self.placed.tensor.is_expert

    @property
    def is_duplicate_across_tp(self) -> bool:
        """Whether all ranks of its tensor parallel group hold these same elements."""
        return self.placed.is_duplicate_across_tp

    @property
    def is_tied_copy(self) -> bool:
        """Whether it is the last stage's copy of a tied embedding."""
        return self.placed.is_tied_copy

    @property
    def is_on_two_stages(self) -> bool:
        """Whether another pipeline stage holds these same elements too: a tied embedding."""
        return self.placed.is_on_two_stages

    @property
    def is_primary(self) -> bool:
        """Whether it counts where elements are counted once within a data parallel replica.

        Of tensor parallel duplicates rank 0's counts, of tied copies the embedding's.
        """
        return self.placed.is_primary


class ParameterView:
    """All parameters of one rank, in model order.

    Build it with ``from_model`` on a running rank.
    """

    def __init__(
        self,
        placement: Placement,
        place: Coordinates,
        entries: Sequence[LocalParameter],
        buffers: Sequence[LocalParameter],
    ) -> None:
        """Hold entries that ``match_chunk`` made; see ``from_model``."""
        self.placement = placement
        self.place = place
        self.entries = tuple(entries)
        self.buffers = tuple(buffers)
        self._by_parameter = {id(entry.parameter): entry for entry in (*self.entries, *self.buffers)}

    @classmethod
    def from_model(
        cls,
        model_chunks: Sequence[torch.nn.Module],
        *,
        vocab_size: int | None = None,
        pg_collection: Any = None,
    ) -> ParameterView:
        """Describe the GPT of this rank, and check the description against ``sharded_state_dict``.

        Collective-free.

        Args:
            model_chunks: the rank's model chunks, wrapped (DDP, Float16Module) or not.
            vocab_size: rows of the vocabulary without padding; None when unknown, then every row counts.
            pg_collection: Megatron's ``ProcessGroupCollection``; None for the one the model was built with.

        Raises:
            ParamsError: naming the option or the tensor, when the model has something this view does not
                know or when Megatron places a tensor differently.
        """
        # Imported late: everything else in this module works without Megatron.
        from megatron_ext.params.live_model import build_view

        return build_view(model_chunks, vocab_size=vocab_size, pg_collection=pg_collection)

    @property
    def shape(self) -> GptShape:
        """The model."""
        return self.placement.shape

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.placement.layout

    def units(self) -> tuple[str, ...]:
        """All units of the model in model order, also those without a tensor on this rank.

        Every rank sees the same tuple, so a loop over it may contain collectives.
        """
        return self.placement.units

    def by_parameter(self, parameter: torch.Tensor) -> LocalParameter:
        """The entry of a live parameter or buffer.

        Raises:
            KeyError: when the tensor is not part of the model.
        """
        return self._by_parameter[id(parameter)]

    def describe(self) -> str:
        """A table for people: one line per tensor of this rank."""
        layout, place = self.layout, self.place
        lines = [
            f"tp {place.tp}/{layout.tp}  pp {place.pp}/{layout.pp}  cp {place.cp}/{layout.cp}  "
            f"dp {place.dp}/{layout.dp}  ep {place.ep}/{layout.ep}  etp {place.etp}/{layout.expert_tp}  "
            f"edp {place.edp}/{layout.expert_dp}",
            "chunk  unit  name  global shape  local shape  type  notes",
        ]
        for entry in (*self.entries, *self.buffers):
            notes = [
                word
                for word, true in (
                    ("buffer", entry.tensor.kind == "buffer"),
                    ("expert", entry.is_expert),
                    ("same on all tp ranks", entry.is_duplicate_across_tp),
                    ("tied copy", entry.is_tied_copy),
                )
                if true
            ]
            lines.append(
                "  ".join(
                    (
                        str(entry.chunk_index),
                        entry.unit,
                        entry.tensor.name,
                        _size(entry.tensor.shape),
                        _size(entry.slice.local_shape),
                        str(entry.tensor.dtype).removeprefix("torch."),
                        ", ".join(notes),
                    )
                ).rstrip()
            )
        return "\n".join(lines)


def match_chunk(
    placement: Placement, place: Coordinates, chunk: int, parameters: NamedTensors, buffers: NamedTensors
) -> tuple[list[LocalParameter], list[LocalParameter]]:
    """Give every tensor of a model chunk its place.

    Args:
        placement: model and layout.
        place: the rank.
        chunk: index of the chunk on the rank.
        parameters: names and tensors of the chunk's parameters.
        buffers: the same for its persistent buffers.

    Returns:
        Entries for the parameters and for the buffers, both in model order.

    Raises:
        ParamsError: when the chunk has a tensor the model should not have, lacks one, or holds one in
            another shape; the message names it.
    """
    expected = {placed.name: placed for placed in placement.on_chunk(place, chunk)}
    first_layer = placement.chunk_layers[chunk * placement.layout.pp + place.pp].start
    first_expert = place.ep * placement.experts_per_rank
    found: dict[str, LocalParameter] = {}
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name_local, tensor in tensors:
            name = global_name(name_local, first_layer=first_layer, first_expert=first_expert)
            placed = expected.get(name)
            if placed is None or placed.tensor.kind != kind or name in found:
                raise ParamsError(
                    f"{kind} {name_local} of chunk {chunk} ({name}) is not one this view knows for this model"
                )
            if tuple(tensor.shape) != placed.slice.local_shape:
                raise ParamsError(
                    f"{kind} {name_local} of chunk {chunk} ({name}) has shape {tuple(tensor.shape)}, "
                    f"expected {placed.slice.local_shape} of the global {placed.tensor.shape}"
                )
            # The live tensor decides its type: wrappers and options (fp32 routers) may change it.
            actual = replace(placed, tensor=replace(placed.tensor, dtype=tensor.dtype))
            found[name] = LocalParameter(
                name_local=name_local, chunk_index=chunk, parameter=tensor, placed=actual
            )
    missing = [name for name in expected if name not in found]
    if missing:
        raise ParamsError(
            f"chunk {chunk} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more tensors" if len(missing) > 1 else "")
        )
    ordered = [found[name] for name in expected]
    return (
        [entry for entry in ordered if entry.tensor.kind == "parameter"],
        [entry for entry in ordered if entry.tensor.kind == "buffer"],
    )


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
