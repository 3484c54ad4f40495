# SPDX-License-Identifier: Apache-2.0
"""Placement: which rank of a layout holds which part of which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_ext.params.boxes import Slice, put, slice_of, take
from megatron_ext.params.gpt import gpt_parameters
from megatron_ext.params.gpt_shape import GptShape
from megatron_ext.params.layout import Coordinates, Layout
from megatron_ext.params.tensors import EMBEDDING_UNIT, FINAL_NORM_UNIT, GlobalTensor, ParamsError, prediction_unit


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One tensor as one rank holds it."""

    tensor: GlobalTensor
    """The global tensor."""

    name: str
    """The name the rank knows it by: the tensor's own, or that of a tied copy."""

    is_tied_copy: bool
    """Whether it is the copy of a tied tensor, on a stage other than the tensor's own."""

    chunk: int
    """Model chunk on the rank (virtual pipeline stage), from 0."""

    slice: Slice
    """Which part of the tensor the rank holds."""

    replica: int
    """Which data parallel copy it is; the copies 0, 1, ... are equal between optimizer steps."""

    is_duplicate_across_tp: bool
    """Whether every rank of the tensor parallel group holds these same elements."""

    is_primary: bool
    """Whether this rank's elements count when the elements of one replica are counted once: true on
    tensor parallel rank 0 for duplicates, and on the embedding's stage for tied copies."""

    is_on_two_stages: bool
    """Whether another pipeline stage of the replica holds these same elements too: a tied embedding."""

    def counts_once(self, *, is_shard: bool) -> bool:
        """Return whether sums over all ranks of a job have to count these elements: of equal copies, one has.

        Args:
            is_shard: of its elements the rank holds a part that no data parallel replica holds as well.
        """
        return self.is_primary and (is_shard or self.replica == 0)


class Placement:
    """A GPT under a layout.

    Attributes:
        shape: the model.
        layout: the layout.
        tensors: every tensor of the model, in model order.
        by_name: the same by global name.
        units: the model's units in model order; the same on every rank, whatever the rank holds.
        chunk_layers: global decoder layers of each model chunk, in the model's order.
        experts_per_rank: routed experts of one expert parallel rank, 0 for a dense model.
    """

    def __init__(self, shape: GptShape, layout: Layout) -> None:
        """Work out where every tensor lives.

        Args:
            shape: the model.
            layout: the layout.

        Raises:
            ParamsError: when the layout cannot hold the model; the message names what does not divide.
        """
        self.shape = shape
        self.layout = layout
        self.tensors = gpt_parameters(shape)
        self.by_name = {tensor.name: tensor for tensor in self.tensors}
        self.units = tuple(dict.fromkeys(tensor.unit for tensor in self.tensors))
        self.chunk_layers = layout.chunk_layers(shape.num_layers)
        self._stage_of_layer = {
            layer: stage for stage, layers in enumerate(self.chunk_layers) for layer in layers
        }
        self._prediction_units = frozenset(map(prediction_unit, range(shape.mtp_num_layers)))
        self._prediction_stage = len(self.chunk_layers) - 1
        if self._prediction_units and layout.prediction_chunk is not None:
            self._prediction_stage = layout.prediction_chunk
        experts = shape.num_moe_experts or 0
        if layout.ep > 1 and not experts:
            raise ParamsError(f"layout: ep is {layout.ep}, but the model has no experts")
        if experts % layout.ep:
            raise ParamsError(f"layout: {experts} experts cannot be shared by ep = {layout.ep} ranks")
        self.experts_per_rank = experts // layout.ep
        if shape.mtp_num_layers and len(self.chunk_layers) > 1:
            # Megatron gives the last stage an output layer that nothing uses, or positions that stay as they are.
            for wrong, what in (
                (shape.share_embeddings_and_output_weights, "tied embeddings; untie them"),
                (shape.max_sequence_length > 0, "learned positions; use --position-embedding-type rope"),
            ):
                if wrong:
                    raise ParamsError(f"layout: multi-token prediction over several stages is not laid out with {what}")

    def on_rank(self, rank: int) -> tuple[Placed, ...]:
        """What rank ``rank`` of the layout holds; see ``on``."""
        return self.on(self.layout.coordinates(rank))

    def on(self, place: Coordinates) -> tuple[Placed, ...]:
        """What the rank at ``place`` holds.

        Returns:
            Entries by chunk, and within a chunk in model order; a tied copy comes last.
        """
        return tuple(placed for chunk in range(self.layout.vpp) for placed in self.on_chunk(place, chunk))

    def on_chunk(self, place: Coordinates, chunk: int) -> tuple[Placed, ...]:
        """What one model chunk of the rank at ``place`` holds, in the order of ``on``."""
        here = chunk * self.layout.pp + place.pp
        held = [
            self._place(tensor, name, number > 0, chunk, place)
            for tensor in self.tensors
            if self.expert_rank(tensor) in (None, place.ep)
            for number, (stage, name) in enumerate(self.stages_of(tensor))
            if stage == here
        ]
        return tuple(sorted(held, key=lambda placed: placed.is_tied_copy))

    def stages_of(self, tensor: GlobalTensor) -> tuple[tuple[int, str], ...]:
        """Where in the pipeline a tensor lives.

        Returns:
            ``(stage, name)`` pairs: the chunk in the model's order (``v * pp + p`` is chunk v of pipeline rank
            p), and the tensor's name there. An embedding has two where it is copied to the last chunk (tied) or
            to that of multi-token prediction, its own first; every other tensor has one.
        """
        if tensor.layer is not None:
            home = self._stage_of_layer[tensor.layer]
        elif tensor.unit == EMBEDDING_UNIT:
            home = 0
        elif tensor.unit == FINAL_NORM_UNIT and self._prediction_units and not self.shape.layer_kinds:
            home = self._stage_of_layer[self.shape.num_layers - 1]  # predictions are of what it has normed
        elif tensor.unit in self._prediction_units:
            home = self._prediction_stage
        else:
            home = len(self.chunk_layers) - 1
        # Tied embeddings, whose copy is on the last stage, are not laid out with predictions over several stages.
        copied_to = self._prediction_stage
        # On a single stage whatever else uses the embedding's weight has it at hand: there is no second copy.
        if tensor.shared_with and copied_to != home:
            return ((home, tensor.name), (copied_to, tensor.shared_with[0]))
        return ((home, tensor.name),)

    def expert_rank(self, tensor: GlobalTensor) -> int | None:
        """The expert parallel rank that holds a tensor; None for one that belongs to no routed expert."""
        return None if tensor.expert is None else tensor.expert // self.experts_per_rank

    def _place(self, tensor: GlobalTensor, name: str, is_copy: bool, chunk: int, place: Coordinates) -> Placed:
        index, parts = (place.etp, self.layout.expert_tp) if tensor.is_expert else (place.tp, self.layout.tp)
        duplicate = tensor.split is None and parts > 1
        return Placed(
            tensor=tensor,
            name=name,
            is_tied_copy=is_copy,
            chunk=chunk,
            slice=slice_of(tensor, index, parts),
            replica=self.layout.replica(place, tensor.is_expert),
            is_duplicate_across_tp=duplicate,
            is_primary=not is_copy and not (duplicate and index > 0),
            is_on_two_stages=len(self.stages_of(tensor)) > 1,
        )


def scatter(values: Mapping[str, torch.Tensor], held: Iterable[Placed]) -> dict[str, torch.Tensor]:
    """Cut full values into what one rank holds.

    Args:
        values: full value of every tensor in ``held``, by global name, in the tensor's global shape.
        held: what the rank holds, from ``Placement.on`` or ``on_rank``.

    Returns:
        New local tensors by ``Placed.name``; copies of a tied tensor get equal values.

    Raises:
        ParamsError: when a value is missing or has another shape.
    """
    local = {}
    for placed in held:
        value = values.get(placed.tensor.name)
        if value is None:
            raise ParamsError(f"no value for {placed.tensor.name}")
        if tuple(value.shape) != placed.tensor.shape:
            raise ParamsError(
                f"{placed.tensor.name}: the value has shape {tuple(value.shape)}, the tensor {placed.tensor.shape}"
            )
        local[placed.name] = take(value, placed.slice)
    return local


def gather(
    tensors: Iterable[GlobalTensor],
    shards: Iterable[tuple[Iterable[Placed], Mapping[str, torch.Tensor]]],
) -> dict[str, torch.Tensor]:
    """Put full values together from what the ranks hold; the inverse of ``scatter``.

    Args:
        tensors: the tensors wanted.
        shards: for each rank what it holds and its local tensors by ``Placed.name``.

    Returns:
        Full values by global name.

    Raises:
        ParamsError: when an element is held by no rank, or when two ranks hold different values for it.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    values: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for held, local in shards:
        for placed in held:
            name = placed.tensor.name
            if name not in wanted:
                continue
            mine = local[placed.name].contiguous()
            if name not in values:
                values[name] = torch.zeros(placed.tensor.shape, dtype=mine.dtype, device=mine.device)
                filled[name] = torch.zeros(placed.tensor.shape, dtype=torch.bool, device=mine.device)
            seen = take(filled[name], placed.slice)
            known = take(values[name], placed.slice)[seen]
            # Bytes, not numbers: copies of a diverged parameter hold equal NaNs.
            if not torch.equal(known.view(torch.uint8), mine[seen].view(torch.uint8)):
                raise ParamsError(f"{name}: two ranks hold different values of the same elements")
            put(mine, placed.slice, values[name])
            put(torch.ones_like(seen), placed.slice, filled[name])
    for name in wanted:
        if name not in filled or not bool(filled[name].all()):
            raise ParamsError(f"{name}: some elements are held by no rank")
    return {name: values[name] for name in wanted}
