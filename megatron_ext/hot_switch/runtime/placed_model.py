# SPDX-License-Identifier: Apache-2.0
"""A model under one strategy: its chunks on this rank, by global names, and the turn in which it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.rows import PackedBatch
from megatron_ext.hot_switch.runtime.masks import DocumentMasks
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.transfer.flat_tensors import FlatTensors
from megatron_ext.hot_switch.transfer.itinerary import LocalTensor
from megatron_ext.params import ParameterView
from megatron_ext.params.router_biases import RouterBiases
from megatron_ext.seams.arguments import with_arguments
from megatron_ext.seams.strategies import ParallelState, keeping_random_state, seed_device

__all__ = ["PlacedModel", "frozen_names"]


def frozen_names(view: ParameterView, group: Any) -> frozenset[str]:
    """Return the names of the model's tensors that are not trained. All ranks of the group must call it.

    Args:
        view: of the rank's tensors.
        group: process group whose ranks have all tensors together.
    """
    mine = [entry.tensor.name for entry in view.entries if not entry.parameter.requires_grad]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return frozenset(name for names in everyone for name in names)


class PlacedModel:
    """What home and guests have in common.

    Attributes:
        strategy: the strategy.
        state: its parallel layout.
        chunks: this rank's model chunks, wrapped in DDP.
        view: their tensors.
        replica: this rank's, of the data.
        is_last_stage: whether this rank has the last pipeline stage.
        reports: whether losses and tokens of this rank's positions are its to report.
        adds_for_all: whether this rank is the one, of those among which Megatron adds up, that adds other strategies'.
        attention: how layers keep documents apart.
        reading_chunks: numbers of the chunks for which Megatron's `get_batch` reads here: other ranks are sent what it
            reads, or need nothing.
        counts_positions: whether what this rank's routers see is not another tensor-parallel rank's to count.
    """

    def __init__(self, strategy: Strategy, state: ParallelState, chunks: Sequence[Any], *, attention: str) -> None:
        """Describe the chunks. Collective-free.

        Args:
            strategy: the strategy.
            state: its parallel layout, which must be in place.
            chunks: the model chunks, wrapped.
            attention: how layers keep documents apart, see `DocumentMasks`.

        Raises:
            RuntimeError: the model's layers lie elsewhere than the strategy says.
            UserError: they would carry their state from a document into the next one of a row.
        """
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model

        self.strategy = strategy
        self.state = state
        self.chunks = list(chunks)
        self.view = ParameterView.from_model(self.chunks)
        RouterBiases(self.view)  # fp32 from here on, as they are moved
        layers = self.view.shape.num_layers
        built = self.view.layout.chunk_layers(layers)
        if built != strategy.layout(layers).chunk_layers(layers):
            raise RuntimeError(
                f"strategy {strategy.label}: the model has chunks of {[len(chunk) for chunk in built]} layers"
            )
        if attention != "padded" and self.view.shape.delta_net is not None:
            raise UserError(
                f"--hot-switch-attention {attention} is not combined with Gated DeltaNet, which the model's config "
                "asks for: it carries its state from a document into the next one of a row; use padded"
            )
        self.attention = attention
        self._masks = DocumentMasks([unwrap_model(chunk) for chunk in self.chunks], self.device, attention=attention)
        # Home's data-parallel dimension goes over all workers.
        self.replica = int(parallel_state.get_data_parallel_rank()) % strategy.dp
        context_rank = int(parallel_state.get_context_parallel_rank())
        self.adds_for_all = self.replica == 0 and context_rank == 0
        self.is_last_stage = bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
        # Losses and tokens are known to all ranks of the last stage; one of those with the same positions speaks.
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        self.reports = self.is_last_stage and is_first
        self.counts_positions = is_first or strategy.sequence_parallel
        is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        ends = (0, is_first_stage), (len(self.chunks) - 1, self.is_last_stage)
        self.reading_chunks = {chunk for chunk, is_end in ends if is_end and is_first}

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.view.entries[0].parameter.device

    @property
    def config(self) -> Any:
        """The `TransformerConfig` that the schedules read."""
        return self.chunks[0].config

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient buffers of the parameters by global name, fp32; what is frozen has none."""
        found = {}
        for entry in self.view.entries:
            gradient: Any = entry.parameter
            if gradient.requires_grad:
                found[entry.placed.name] = gradient.main_grad
        return found

    def gradient_sums(self) -> FlatTensors:
        """Return tensors like `gradients` for those of other strategies; they have no memory yet."""
        # A guest's parameters have no shape outside its turn.
        local = {name: LocalTensor(tuple(gradient.shape), torch.float32) for name, gradient in self.gradients().items()}
        sums = FlatTensors(local, self.device)
        sums.give_up()
        return sums

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Have all parameters up to date now that Megatron would gather in the next forward pass."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @contextmanager
    def turn(self, row_length: int, batches: Sequence[PackedBatch], seed: int) -> Iterator[None]:
        """Let Megatron, and the user's functions, see this strategy's layout, its rows and their masks.

        Args:
            row_length: positions of a row.
            batches: this rank's micro-batches.
            seed: for dropout. It belongs to the step and the strategy: what replicas draw depends on their documents,
                so that generators that kept their state from step to step would drift apart, and checkpoints have
                one's.
        """
        with ExitStack() as stack:
            stack.enter_context(keeping_random_state())
            stack.enter_context(self.state.installed())
            stack.enter_context(with_arguments(**self._arguments(row_length)))
            stack.enter_context(self._masks.of(batches))
            stack.enter_context(self._deferring(len(batches)))
            seed_device(seed)
            yield

    @contextmanager
    def _deferring(self, micro_batches: int) -> Iterator[None]:
        """Have no gradient deferred of a single micro-batch, with which Megatron fails."""
        defers = self.config.defer_embedding_wgrad_compute
        self.config.defer_embedding_wgrad_compute = defers and micro_batches > 1
        try:
            yield
        finally:
            self.config.defer_embedding_wgrad_compute = defers

    def _arguments(self, row_length: int) -> Mapping[str, Any]:
        strategy = self.strategy
        return {
            "tensor_model_parallel_size": strategy.tp,
            "pipeline_model_parallel_size": strategy.pp,
            "transformer_pipeline_model_parallel_size": strategy.pp,
            "virtual_pipeline_model_parallel_size": strategy.vpp if strategy.vpp > 1 else None,
            "context_parallel_size": strategy.cp,
            "data_parallel_size": strategy.dp,
            "expert_model_parallel_size": strategy.ep,
            "expert_tensor_parallel_size": strategy.expert_tp,
            # Megatron makes these of the sizes above, and refuses a config where they contradict them.
            "tensor_parallel_num_weight_shards": strategy.tp,
            "expert_tensor_parallel_num_weight_shards": strategy.expert_tp,
            "sequence_parallel": strategy.sequence_parallel,
            # A user's function may ask what the layers of its stage are.
            "num_layers_per_virtual_pipeline_stage": None,
            "num_virtual_stages_per_pipeline_rank": strategy.vpp if strategy.vpp > 1 else None,
            "decoder_first_pipeline_num_layers": strategy.first_stage_layers,
            "decoder_last_pipeline_num_layers": strategy.last_stage_layers,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "pipeline_model_parallel_layout": strategy.stages_text(self.config.mtp_num_layers or 0),
            "defer_embedding_wgrad_compute": self.config.defer_embedding_wgrad_compute,
            "micro_batch_size": strategy.micro_batch_size,
            "seq_length": row_length,
            # The masks of documents are given to the model itself.
            "create_attention_mask_in_dataloader": False,
        }
