# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts: how many ranks share what, and which layers a pipeline chunk holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.params.tensors import ParamsError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_AXES = frozenset({"tp", "cp", "ep", "dp", "pp"})


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The place of one rank in a layout. Every field counts from 0."""

    tp: int = 0
    """Tensor parallel rank of the dense parameters."""

    pp: int = 0
    """Pipeline stage."""

    cp: int = 0
    """Context parallel rank."""

    dp: int = 0
    """Data parallel rank of the dense parameters."""

    ep: int = 0
    """Expert parallel rank."""

    etp: int = 0
    """Tensor parallel rank of the expert parameters."""

    edp: int = 0
    """Data parallel rank of the expert parameters."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions and the order in which they number the ranks.

    Dense parameters live on the grid (tp, cp, dp, pp), expert parameters on (etp, ep, edp, pp); both grids
    number the same ranks.
    """

    tp: int = 1
    """Tensor parallel size."""

    pp: int = 1
    """Pipeline parallel size."""

    vpp: int = 1
    """Model chunks per pipeline stage (virtual pipeline size), 1 without interleaving."""

    ep: int = 1
    """Expert parallel size."""

    etp: int | None = None
    """Tensor parallel size of the experts; None for the dense tensor parallel size."""

    dp: int = 1
    """Data parallel size of the dense parameters, without context parallelism."""

    cp: int = 1
    """Context parallel size."""

    order: str = DEFAULT_ORDER
    """The dimensions from the fastest to the slowest changing rank number."""

    layers_per_chunk: tuple[int, ...] = ()
    """Decoder layers of each chunk in the model's order (chunk ``v * pp + p`` is chunk v of stage p);
    empty for an even split. ``uneven_layers`` computes it from Megatron's options."""

    prediction_chunk: int | None = None
    """The chunk in the model's order that has the layers of multi-token prediction; None for the last."""

    def __post_init__(self) -> None:
        """Refuse sizes that no set of ranks can have."""
        for field in ("tp", "pp", "vpp", "ep", "dp", "cp"):
            if getattr(self, field) < 1:
                raise ParamsError(f"layout: {field} must be at least 1, got {getattr(self, field)}")
        if self.etp is not None and self.etp < 1:
            raise ParamsError(f"layout: etp must be at least 1 or None, got {self.etp}")
        if self.vpp > 1 and self.pp == 1:
            raise ParamsError(f"layout: vpp is {self.vpp}, but interleaving needs pp > 1")
        if set(self.order.split("-")) != _AXES or len(self.order.split("-")) != len(_AXES):
            raise ParamsError(f"layout: order must name tp, cp, ep, dp and pp once each, got '{self.order}'")
        if self.world_size % (self.expert_tp * self.ep * self.pp):
            raise ParamsError(
                f"layout: {self.world_size} ranks (tp*cp*dp*pp) cannot be divided by "
                f"etp*ep*pp = {self.expert_tp * self.ep * self.pp}; change ep or etp"
            )
        if self.layers_per_chunk and len(self.layers_per_chunk) != self.pp * self.vpp:
            raise ParamsError(
                f"layout: layers_per_chunk must have pp*vpp = {self.pp * self.vpp} entries, "
                f"got {len(self.layers_per_chunk)}"
            )
        if self.prediction_chunk is not None and not 0 <= self.prediction_chunk < self.pp * self.vpp:
            raise ParamsError(
                f"layout: prediction_chunk must be from 0 to {self.pp * self.vpp - 1}, got {self.prediction_chunk}"
            )

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Data parallel size of the experts: what the other expert dimensions leave over."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @property
    def replicas(self) -> int:
        """How many times each dense parameter exists because of data and context parallelism."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Where rank ``rank`` (0 to ``world_size - 1``) stands on both grids."""
        if not 0 <= rank < self.world_size:
            raise ParamsError(f"layout: rank {rank} is outside 0..{self.world_size - 1}")
        dense = self._unravel(rank, {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp})
        expert = self._unravel(
            rank, {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        )
        if dense["pp"] != expert["pp"]:
            raise ParamsError(
                f"layout: with order '{self.order}' dense and expert parameters of rank {rank} "
                f"would sit on different pipeline stages; put pp last or use etp = tp"
            )
        return Coordinates(
            tp=dense["tp"],
            pp=dense["pp"],
            cp=dense["cp"],
            dp=dense["dp"],
            ep=expert["ep"],
            etp=expert["tp"],
            edp=expert["dp"],
        )

    def replica(self, place: Coordinates, is_expert: bool) -> int:
        """Which of the data parallel copies of a parameter the rank at ``place`` holds."""
        return place.edp if is_expert else place.dp * self.cp + place.cp

    def chunk_layers(self, num_layers: int) -> tuple[range, ...]:
        """Global decoder layers of each chunk, in the model's order.

        Raises:
            ParamsError: when the layers cannot be split as the layout says.
        """
        chunks = self.pp * self.vpp
        counts = self.layers_per_chunk
        if not counts:
            if num_layers % chunks:
                raise ParamsError(
                    f"layout: {num_layers} layers cannot be split evenly over pp*vpp = "
                    f"{chunks} chunks; set layers_per_chunk"
                )
            counts = (num_layers // chunks,) * chunks
        if sum(counts) != num_layers:
            raise ParamsError(
                f"layout: layers_per_chunk adds up to {sum(counts)}, the model has {num_layers} layers"
            )
        starts = [sum(counts[:index]) for index in range(chunks)]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))

    def _unravel(self, rank: int, sizes: dict[str, int]) -> dict[str, int]:
        place = {}
        for axis in self.order.split("-"):
            rank, place[axis] = divmod(rank, sizes[axis])
        return place


def uneven_layers(
    num_layers: int,
    *,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> tuple[int, ...]:
    """Decoder layers per chunk for Megatron's uneven pipeline options.

    Args:
        num_layers: decoder layers of the model.
        pp: pipeline parallel size.
        vpp: chunks per stage.
        first: layers of the first stage, all its chunks together (``--decoder-first-pipeline-num-layers``).
        last: the same for the last stage (``--decoder-last-pipeline-num-layers``).
        embedding_counts: the embedding takes a layer's place (``--account-for-embedding-in-pipeline-split``).
        loss_counts: the loss takes a layer's place (``--account-for-loss-in-pipeline-split``).

    Returns:
        A value for ``Layout.layers_per_chunk``.

    Raises:
        ParamsError: when the options contradict each other or do not divide evenly.
    """
    if (first is not None or last is not None) and (embedding_counts or loss_counts):
        raise ParamsError(
            "layout: layers of the first or last stage cannot be combined with counting the "
            "embedding or the loss as a layer"
        )
    per_stage: list[int | None] = [None] * pp
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    rest = num_layers + embedding_counts + loss_counts - sum(size or 0 for size in per_stage)
    free = per_stage.count(None)
    if rest < 0 or (rest % free if free else rest):
        raise ParamsError(f"layout: {rest} layers cannot be split evenly over {free} pipeline stages")
    sizes = [rest // free if size is None else size for size in per_stage]
    for stage, size in enumerate(sizes):
        if size % vpp:
            raise ParamsError(f"layout: the {size} layers of stage {stage} cannot be split over {vpp} chunks")
    counts = [sizes[stage] // vpp for _ in range(vpp) for stage in range(pp)]
    counts[0] -= embedding_counts
    counts[-1] -= loss_counts
    if min(counts) < 0:
        raise ParamsError(
            "layout: the first or the last chunk has no layer's place for the embedding or the loss"
        )
    return tuple(counts)


def shard_range(start: int, stop: int, bucket_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which elements of a parameter a data parallel rank owns under the distributed optimizer.

    The optimizer flattens parameters into a bucket and cuts the bucket into equal, contiguous parts,
    without regard for where a parameter starts.

    Args:
        start: first element of the parameter in the bucket.
        stop: one past its last element.
        bucket_size: elements of the bucket, padding included; a multiple of ``ranks``.
        rank: data parallel rank, from 0.
        ranks: data parallel size.

    Returns:
        ``(first, end)`` in elements of the flattened local parameter; equal numbers when it owns none.

    Raises:
        ParamsError: when the bucket cannot be cut evenly.
    """
    if bucket_size % ranks:
        raise ParamsError(f"a bucket of {bucket_size} elements cannot be cut into {ranks} equal shards")
    part = bucket_size // ranks
    first = max(start, rank * part)
    end = min(stop, (rank + 1) * part)
    return (first - start, end - start) if first < end else (0, 0)
