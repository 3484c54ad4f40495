# SPDX-License-Identifier: Apache-2.0
"""Building guests: home's model once more, under another strategy."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import BuilderDone
from megatron_ext.hot_switch.runtime.guest import Guest, SwitchOptions
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.params import ParameterView
from megatron_ext.seams.strategies import ParallelState, keeping_random_state

__all__ = ["build_guest"]


def build_guest(
    strategy: Strategy,
    state: ParallelState,
    context: BuilderDone,
    *,
    home: ParameterView,
    before: Guest | None,
    options: SwitchOptions,
) -> Guest:
    """Build the model under another strategy, like Megatron built home's. All ranks must call it.

    Raises:
        UserError: the model was built with hooks, which a guest would not have.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if context.config.pre_wrap_hooks or context.config.post_wrap_hooks:
        raise UserError(
            "hot switching: the model's config has pre_wrap_hooks or post_wrap_hooks, which change home's model only; "
            "build the model without them"
        )
    config = copy.deepcopy(context.config)
    config.vocab_size, config.should_pad_vocab = home.shape.padded_vocab_size, False
    _adapt(config.transformer, strategy)
    ddp_config = dataclasses.replace(
        context.ddp_config,
        use_distributed_optimizer=False,
        num_distributed_optimizer_instances=1,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_reduce_in_fp32=True,
        reduce_scatter_with_fp32_accumulation=False,
        bucket_size=None,
        num_buckets=None,
        # All of them are summed in fp32 already, and Megatron refuses to be told so twice.
        param_name_patterns_for_fp32_local_accumulation=(),
    )
    with keeping_random_state(), state.installed():
        chunks = context.build_again(
            config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=ddp_config,
            data_parallel_random_init=False,
        )
        return Guest(strategy, state, chunks, home=home, before=before, options=options)


def _adapt(transformer: Any, strategy: Strategy) -> None:
    """Give a home's copied `TransformerConfig` a guest's layout, and what Megatron derives from one."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    transformer.tensor_model_parallel_size = strategy.tp
    transformer.pipeline_model_parallel_size = strategy.pp
    transformer.virtual_pipeline_model_parallel_size = strategy.vpp if strategy.vpp > 1 else None
    transformer.num_layers_in_first_pipeline_stage = strategy.first_stage_layers
    transformer.num_layers_in_last_pipeline_stage = strategy.last_stage_layers
    text = strategy.stages_text(transformer.mtp_num_layers or 0)
    transformer.pipeline_model_parallel_layout = (
        None if text is None else PipelineParallelLayerLayout(text, strategy.pp)
    )
    transformer.account_for_embedding_in_pipeline_split = transformer.account_for_loss_in_pipeline_split = False
    transformer.microbatch_group_size_per_vp_stage = strategy.micro_batch_group or strategy.pp
    transformer.context_parallel_size = strategy.cp
    transformer.expert_model_parallel_size = strategy.ep
    transformer.expert_tensor_parallel_size = strategy.expert_tp
    transformer.tensor_parallel_num_weight_shards = strategy.tp
    transformer.expert_tensor_parallel_num_weight_shards = transformer.expert_tensor_parallel_size
    transformer.sequence_parallel = strategy.sequence_parallel
    transformer.overlap_p2p_comm = strategy.vpp > 1
    transformer.batch_p2p_comm = not transformer.overlap_p2p_comm
    # Megatron waits for all of the device after every exchange of pipeline stages, and so for parameters that are still
    # in flight, because of an error in a torch that is older than any that Megatron 0.19 runs with.
    transformer.batch_p2p_sync = False
    if strategy.pp == 1:
        # Only a pipeline's schedule computes what was deferred.
        transformer.defer_embedding_wgrad_compute = False
    transformer.recompute_granularity = None if strategy.recompute == "none" else strategy.recompute
    if strategy.recompute == "full":
        transformer.recompute_method = transformer.recompute_method or "uniform"
        transformer.recompute_num_layers = transformer.recompute_num_layers or 1
    else:
        transformer.recompute_method = transformer.recompute_num_layers = None
    # Home's parameters take the place of what would be drawn here.
    transformer.perform_initialization = False
