# SPDX-License-Identifier: Apache-2.0
"""How long a strategy takes for rows of given lengths, and whether they fit: a model, for choosing before running.

A row that holds sequences of s_1, s_2, ... positions takes a pipeline stage

    t = a (s_1^2 + s_2^2 + ...) + b (s_1 + s_2 + ...) + c        seconds, forward and backward,

with a, b, c of a (TP, PP): the form in which Hydraulis (the successor of HotSPa) fits measured times. Where nothing was
measured they are worked out from the model's operations, the bytes that tensor parallelism moves, and what a GPU and a
link do per second. Pipelines run 1F1B: with m micro-batches of the longest time t and P stages, (m + P - 1) t.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_ext.hot_switch.cost_model.stages import Stage, stages_of, stages_together
from megatron_ext.hot_switch.data.packing import StrategyBatch
from megatron_ext.hot_switch.planning.figures import Links
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.params import GptShape, gpt_parameters

__all__ = ["Coefficients", "Machine", "ModelledTimes", "Recompute", "StepParts", "StepTimes"]

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: attention's scores, or whole layers (`--recompute-granularity`)."""

_BACKWARD = 3.0
"""Operations of forward and backward together, by those of forward."""

_OF_ACTIVATIONS = 34
"""Bytes that one position of one layer keeps for the backward pass, by the hidden size, over all TP ranks (Korthikanti
et al., arXiv 2205.05198, equation 4 with flash attention: no s^2 term)."""

_OF_INPUTS = 2
"""The same where a layer is computed again in the backward pass: its input in bf16 (ibid., table 2)."""

_OF_SCORES = 2
"""Bytes of an attention score."""

_AGAIN = 4 / 3
"""Operations of a row whose forward pass is made twice, by those of one whose is made once."""

_EXCHANGED = {"none": 4, "selective": 4, "full": 6}
"""All-reduces of a layer's activations over TP ranks: two in each forward pass, two in the backward pass."""

_GUEST_BYTES = 6
"""Of a guest's parameter: bf16, and an fp32 gradient."""

_HOME_BYTES = 6
_SUM_BYTES = 4
"""Of an fp32 sum of other strategies' gradients: for home's parameters when there are guests, for a guest's where the
guest before it sends its gradients there."""

_OPTIMIZER_BYTES = 12
"""Of home's parameter: those, and fp32 values and two Adam moments, which the distributed optimizer spreads over DP."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the GPUs of a job do per second, and hold."""

    operations: float
    """Floating-point operations per second that one GPU reaches in training, not those of its data sheet."""

    memory: float
    """Bytes of one GPU that training may use."""

    links: Links
    """Between the GPUs."""

    gpus_per_node: int = 8
    """Ranks of a node."""

    layer_overhead: float = 2e-4
    """Seconds that a layer costs for every row, forward and backward, however short the row is."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Of the time of a row on one pipeline stage, in seconds."""

    squared: float
    """a: by the sum of the squared lengths of its sequences."""

    linear: float
    """b: by the sum of their lengths, padding included."""

    constant: float
    """c."""

    def seconds(self, squares: float, positions: float) -> float:
        """Return the time of a row.

        Args:
            squares: sum of the squared lengths of its sequences.
            positions: its length.
        """
        return self.squared * squares + self.linear * positions + self.constant


@dataclass(frozen=True, kw_only=True)
class ModelledTimes:
    """Coefficients from first principles, and those that were measured in their place."""

    shape: GptShape
    """The model."""

    machine: Machine
    """The GPUs."""

    measured: Mapping[tuple[int, int], Coefficients] = field(default_factory=dict)
    """By (TP, PP), of rows of which nothing is computed again."""

    unfused_attention: bool = False
    """Whether attention makes whole score matrices, also what is masked, and keeps its weights for the backward
    pass, as Megatron's unfused one does, and not a fused kernel."""

    active_experts: int = 1
    """Routed experts that a position meets in a layer (`--moe-router-topk`)."""

    recompute: Recompute = "none"
    """What strategies compute again that say nothing themselves."""

    def recomputed_by(self, strategy: Strategy) -> Recompute:
        """Return what a strategy computes again."""
        return self.recompute if strategy.recompute == "none" else strategy.recompute

    def of(self, strategy: Strategy) -> Coefficients:
        """Return the coefficients of a strategy, with what is computed again.

        Measured ones, of rows of which nothing is, grow as the modelled ones do.
        """
        recompute = self.recomputed_by(strategy)
        found, once = self._modelled(strategy, recompute), self.measured.get((strategy.tp, strategy.pp))
        if once is None:
            return found
        modelled = self._modelled(strategy, "none")
        return Coefficients(
            squared=once.squared * (found.squared / modelled.squared),
            linear=once.linear * (found.linear / modelled.linear),
            constant=once.constant * (_AGAIN if recompute == "full" else 1),
        )

    def _modelled(self, strategy: Strategy, recompute: Recompute) -> Coefficients:
        shape, machine = self.shape, self.machine
        layers = -(-shape.num_layers // strategy.pp)
        # Of whole layers; the output layer is none of them.
        of_layers, of_scores = (_AGAIN if recompute in kinds else 1 for kinds in (("full",), ("full", "selective")))
        # Scores and their use, 2 * 2 s^2 h operations; causal attention masks one half, which fused kernels leave out.
        attention = shape.num_attention_heads * shape.score_size * (2 if self.unfused_attention else 1)
        squared = _BACKWARD * of_scores * attention * layers / strategy.tp / machine.operations
        weights = of_layers * (self.largest_stage(strategy.pp) - self._output_elements) + self._output_elements
        compute = _BACKWARD * 2 * weights / strategy.tp / machine.operations
        # All-reduces of a layer's bf16 activations.
        ring = 2 * (strategy.tp - 1) / strategy.tp
        crosses = strategy.tp > machine.gpus_per_node
        bandwidth = machine.links.between_nodes if crosses else machine.links.within_node
        exchange = _EXCHANGED[recompute] * layers * ring * 2 * shape.hidden_size / bandwidth
        return Coefficients(
            squared=squared, linear=compute + exchange, constant=of_layers * layers * machine.layer_overhead
        )

    @property
    def _output_elements(self) -> int:
        return self.shape.padded_vocab_size * self.shape.hidden_size

    def largest_stage(self, pp: int) -> float:
        """Return the number of matrix elements that every position meets on the fullest stage."""
        dense, experts = _elements(self.shape)
        layers = dense + experts * self.active_experts / (self.shape.num_moe_experts or 1)
        # The last stage has the output layer, tied or not.
        return layers / self.shape.num_layers * -(-self.shape.num_layers // pp) + self._output_elements


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Where the seconds of a strategy's part of a step go, in the mean over its GPUs."""

    computing: float = 0.0
    """Forward and backward passes of rows, padding and what is computed again included."""

    waiting: float = 0.0
    """For other stages, and for the replica with the slowest rows."""

    reducing: float = 0.0
    """Gradients over the data-parallel ranks."""

    @property
    def seconds(self) -> float:
        """Of all."""
        return self.computing + self.waiting + self.reducing


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times and memory of strategies."""

    times: ModelledTimes
    """Of rows."""

    attention: Literal["documents", "rows"] = "documents"
    """Over what attention is computed: each document of a row, or the whole row, the scores of other documents being
    masked afterwards, as Megatron's local implementation does."""

    def parts(self, strategy: Strategy, batch: StrategyBatch, lengths: Sequence[int]) -> StepParts:
        """Return how long a strategy computes, waits, and adds up its gradients over the data-parallel ranks.

        Args:
            strategy: with one row per micro-batch.
            batch: what it trains.
            lengths: of the sequences that the rows name.
        """
        coefficients = self.times.of(strategy)
        slowest = computing = 0.0
        for replica in batch.micro_batches:
            rows = [
                coefficients.seconds(
                    batch.row_length**2
                    if self.attention == "rows"
                    else sum(lengths[sequence] ** 2 for sequence in row),
                    batch.row_length,
                )
                for rows in replica
                for row in rows
            ]
            computing += sum(rows) / len(batch.micro_batches)
            slowest = max(slowest, sum(rows) + (strategy.pp - 1) * max(rows))
        return StepParts(
            computing=computing, waiting=slowest - computing, reducing=self.gradient_seconds(strategy)
        )

    def seconds(self, strategy: Strategy, batch: StrategyBatch, lengths: Sequence[int]) -> float:
        """Return the time of all of it; see `parts`."""
        return self.parts(strategy, batch, lengths).seconds

    def gradient_seconds(self, strategy: Strategy) -> float:
        """Return how long a ring all-reduce of the fullest stage's fp32 gradients over data parallelism takes."""
        machine = self.times.machine
        spread = strategy.dp * strategy.tp > machine.gpus_per_node
        bandwidth = machine.links.between_nodes if spread else machine.links.within_node
        elements = max(stage.elements for stage in stages_of(self.times.shape, strategy))
        return 2 * (strategy.dp - 1) / strategy.dp * 4 * elements / bandwidth

    def memory(
        self, strategy: Strategy, positions: int, home: Strategy, *, switches: bool = False, receives: bool = False
    ) -> float:
        """Return the bytes of the fullest GPU while a strategy trains rows.

        Args:
            strategy: the one that trains.
            positions: length of its rows.
            home: what keeps parameters, gradients and the optimizer's state meanwhile; may be the same.
            switches: whether home has guests, whose gradients it adds up.
            receives: whether another guest's gradients wait at this one.
        """
        fullest = 0.0
        for own, of_home in stages_together(self.times.shape, strategy, home):
            held = of_home.optimizer_elements * _OPTIMIZER_BYTES
            held += of_home.elements * (_HOME_BYTES + _SUM_BYTES * switches)
            if strategy != home:
                held += own.elements * (_GUEST_BYTES + _SUM_BYTES * receives)
            fullest = max(fullest, held + self._activations(own, strategy, positions))
        return fullest

    def _activations(self, stage: Stage, strategy: Strategy, positions: int) -> float:
        """Return the bytes that the rows in a stage take until their backward passes, on one of TP ranks."""
        shape, tp, recompute = self.times.shape, strategy.tp, self.times.recomputed_by(strategy)
        layers = stage.layers * stage.waiting
        # Layers that are computed again keep their inputs, and the one whose turn it is has all of its activations.
        whole = 1 if recompute == "full" else layers
        per_position = (whole * _OF_ACTIVATIONS + (layers - whole) * _OF_INPUTS) * shape.hidden_size / tp
        if stage.has_output:
            per_position += shape.padded_vocab_size / tp * 8  # logits in bf16, and in fp32 with their gradient in turn
        scores = 0.0
        if self.times.unfused_attention:
            # The softmax of every layer that keeps it, and the scores that one layer makes it from.
            kept = layers if recompute == "none" else 1
            scores = (kept + 1) * shape.num_attention_heads / tp * _OF_SCORES * positions**2
        return positions * per_position + scores


@functools.cache
def _elements(shape: GptShape) -> tuple[int, int]:
    """Return the elements of layers' parameters that are not routed experts', and of those that are."""
    tensors = gpt_parameters(shape)
    experts = sum(tensor.numel for tensor in tensors if tensor.is_expert)
    layers = sum(tensor.numel for tensor in tensors if tensor.layer is not None)
    return layers - experts, experts
