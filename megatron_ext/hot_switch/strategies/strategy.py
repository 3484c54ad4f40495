# SPDX-License-Identifier: Apache-2.0
"""Strategies: the parallel layouts of one job, and what else differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ext.params import Layout, uneven_layers

__all__ = ["RECOMPUTE", "Strategy"]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to spread the model and the data over all ranks of the job.

    The fields are only stored here; `read_strategies` checks them, all together.
    """

    dp: int
    """Data parallel size."""

    tp: int
    """Tensor parallel size."""

    pp: int
    """Pipeline parallel size."""

    cp: int = 1
    """Context parallel size."""

    ep: int = 1
    """Expert parallel size."""

    etp: int | None = None
    """Tensor parallel size of the experts; None for `tp`."""

    vpp: int = 1
    """Model chunks per pipeline stage (virtual pipeline size), 1 without interleaving."""

    first_stage_layers: int | None = None
    """Decoder layers of the first pipeline stage; None for an even share."""

    last_stage_layers: int | None = None
    """Decoder layers of the last pipeline stage; None for an even share."""

    stage_layers: tuple[int, ...] | None = None
    """Decoder layers of each chunk, chunk `v * pp + p` being chunk v of stage p; None for what the fields above say.
    Only the first and the last chunk may have none."""

    micro_batch_group: int | None = None
    """Micro-batches that a chunk takes one after the other where stages are interleaved (vpp above 1); None for pp."""

    sequence_parallel: bool = False
    """Whether activations between the tensor parallel regions are split along the sequence."""

    micro_batch_size: int = 1
    """Packed rows in one micro-batch."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in the backward pass."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Number of ranks over which an expert is cut: those of a layer unless `etp` says otherwise."""
        return self.tp if self.etp is None else self.etp

    @property
    def row_multiple(self) -> int:
        """What the positions of a row must be divisible by.

        Context parallelism gives every rank two parts of a row; sequence parallelism cuts those again.
        """
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def runnable_micro_batches(self, count: int) -> int:
        """Return how many micro-batches Megatron's schedule needs, to run at least `count`.

        The interleaved schedule runs groups of them, of which the last one may be smaller, but not than the pipeline.
        """
        if self.vpp == 1:
            return count
        group = self.micro_batch_group or self.pp
        count = max(count, group)
        rest = count % group
        return count + self.pp - rest if 0 < rest < self.pp else count

    def stages_text(self, prediction_layers: int = 0) -> str | None:
        """Return `stage_layers` as Megatron's `--pipeline-model-parallel-layout` has them, such as `Ett|tt|ttL`.

        Args:
            prediction_layers: those of multi-token prediction, which the last chunk has.
        """
        if self.stage_layers is None:
            return None
        return "E" + "|".join("t" * count for count in self.stage_layers) + "m" * prediction_layers + "L"

    @property
    def label(self) -> str:
        """`dp,tp,pp`, followed by the other sizes where they are not 1, e.g. `2,2,2 cp2 vpp2`."""
        others = [
            f" {name}{size}" for name in ("cp", "ep", "etp", "vpp") if (size := getattr(self, name)) not in (1, None)
        ]
        ends = [
            f" {name}{layers}"
            for name, layers in (("first", self.first_stage_layers), ("last", self.last_stage_layers))
            if layers is not None
        ]
        listed = [] if self.stage_layers is None else [" layers" + "-".join(map(str, self.stage_layers))]
        return f"{self.dp},{self.tp},{self.pp}" + "".join([*others, *ends, *listed])

    def layout(self, num_layers: int) -> Layout:
        """Return the layout that this strategy gives a model of `num_layers` decoder layers.

        Ranks are numbered in Megatron's default order, tp-cp-ep-dp-pp. Without CP that is HotSPa's
        order as well: rank = pp_i * (dp * tp) + dp_i * tp + tp_i.

        Raises:
            ParamsError: the sizes do not fit together, or the layers cannot be split like that.
        """
        layers = self.stage_layers or ()
        if self.first_stage_layers is not None or self.last_stage_layers is not None:
            layers = uneven_layers(
                num_layers, pp=self.pp, vpp=self.vpp, first=self.first_stage_layers, last=self.last_stage_layers
            )
        return Layout(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            etp=self.etp,
            dp=self.dp,
            cp=self.cp,
            layers_per_chunk=layers,
        )
