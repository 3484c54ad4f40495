# SPDX-License-Identifier: Apache-2.0
"""What a rank that was built says about itself and its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_ext.activation import registry
from megatron_ext.backends import cpu
from megatron_ext.errors import UserError
from megatron_ext.explain import memory, of_hot_switch, of_local_sgd, step_traffic
from megatron_ext.explain.activations import activations
from megatron_ext.explain.checkpoint_parts import parts_of
from megatron_ext.explain.config import ExplainConfig
from megatron_ext.explain.lone_rank import LoneRank
from megatron_ext.explain.lone_rank import patches as own_patches
from megatron_ext.explain.rank_figures import JobFigures, RankFigures
from megatron_ext.hooks import Feature, hooks
from megatron_ext.hot_switch.feature import HotSwitchFeature
from megatron_ext.local_sgd.feature import LocalSGDFeature
from megatron_ext.params import GptShape, ParameterView, gpt_parameters
from megatron_ext.params.layer_parts import LayerPart
from megatron_ext.params.tensors import prediction_unit
from megatron_ext.worker_cuts import computed_places

__all__ = ["survey"]


def survey(rank: LoneRank, asked: ExplainConfig) -> tuple[JobFigures, RankFigures, list[int]]:
    """Return the figures of the job and of the rank, and a rank of every pipeline stage that is unlike its own.

    Raises:
        UserError: a feature meets a model that it does not know.
    """
    from megatron.core import parallel_state as state

    args = rank.asked
    local_sgd = next((feature for feature in rank.features if isinstance(feature, LocalSGDFeature)), None)
    workers = _workers(hooks.worker_count(args), args.world_size)
    data_parallel = state.get_data_parallel_world_size()
    micro_batches = args.global_batch_size // (args.micro_batch_size * data_parallel)
    column = dist.get_process_group_ranks(state.get_pipeline_model_parallel_group())
    stage = state.get_pipeline_model_parallel_rank()
    notes = []
    view, problem = _view(rank)
    alike = _alike_stages(view, len(column))
    if problem is not None:
        notes.append(problem)
    uses, sent = memory.memory_of(rank), []
    uses.append(activations(args, _shape(rank), micro_batches))
    if view is not None:
        sent = step_traffic.traffic_of(rank, view.shape, _parts(view), stage=stage, micro_batches=micro_batches)
    facts: dict[str, Any] = {}
    if local_sgd is not None:
        engine = of_local_sgd.engine_of(rank, local_sgd)
        uses += of_local_sgd.memory_of_rounds(engine, pinned=asked.backend == "cuda")
        sent += of_local_sgd.traffic_of_rounds(engine)
        facts["local-sgd"] = of_local_sgd.facts_of(args, workers)
    switching = next((feature for feature in rank.features if isinstance(feature, HotSwitchFeature)), None)
    if switching is not None:
        uses += of_hot_switch.memory_of_guests(switching.guests)
        sent += of_hot_switch.traffic_of_switches(switching)
        facts["hot-switch"] = of_hot_switch.facts_of(switching, args.num_layers)
    if any(feature.name == "sync-service" for feature in rank.features):
        from megatron_ext.explain import of_sync_service  # which imports gRPC's messages

        assert view is not None  # without it there would have been an error
        peer = of_sync_service.PeerOfRank(rank, view)
        uses += peer.memory()
        sent += peer.traffic()
        facts["sync-service"] = peer.facts()
    total, active = (None, None) if view is None else _parameters(view.shape, args.moe_router_topk)
    figures = RankFigures(
        rank=args.rank,
        stages=next(group for group in alike if stage in group),
        stage_ranks=args.world_size // len(workers) // len(column),
        parameters=sum(parameter.numel() for chunk in rank.model for parameter in chunk.parameters()),
        trained=memory.trained_elements(rank.optimizer),
        memory=uses,
        traffic=sent,
    )
    parts = [] if view is None else parts_of(rank, view.shape, figures, len(workers))
    job = JobFigures(
        sizes=_sizes(args),
        features=[feature.name for feature in rank.features if feature.name != "cpu"],
        workers=workers,
        parameters=total,
        active_parameters=active,
        step_tokens=args.global_batch_size * args.seq_length // len(workers),
        micro_batches=micro_batches,
        checkpoint=parts,
        patches=_patches(rank.features),
        facts=facts,
        notes=notes,
    )
    return job, figures, [column[group[0]] for group in alike if stage not in group]


def _alike_stages(view: ParameterView | None, stages: int) -> list[list[int]]:
    """Return the pipeline stages, those together whose ranks hold tensors of the same sizes."""
    if view is None:
        return [[stage] for stage in range(stages)]
    found: dict[Any, list[int]] = {}
    for stage in range(stages):
        held = view.placement.on(replace(view.place, pp=stage))
        # The first and last stages send less than those between them.
        ends = (stage == 0, stage == stages - 1)
        found.setdefault((ends, tuple(placed.slice.local_shape for placed in held)), []).append(stage)
    return list(found.values())


def _workers(count: int, world: int) -> list[list[int]]:
    """Return the ranks of every worker."""
    if count == 1:
        return [list(range(world))]
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, (worker, _) in enumerate(computed_places(count)):
        found[worker].append(rank)
    return found


def _sizes(args: Any) -> dict[str, int]:
    from megatron.core import parallel_state as state

    return {
        "world": args.world_size,
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "dp": args.data_parallel_size,
    }


def _view(rank: LoneRank) -> tuple[ParameterView | None, str | None]:
    """Return the rank's parameters in global terms, or why they have none: a stock run may train any model."""
    try:
        return ParameterView.from_model(rank.model), None
    except UserError as error:
        if [feature for feature in rank.features if feature.name != "cpu"]:
            raise
        return None, f"parameters of the whole model, activations' traffic and checkpoints are left out: {error}"


def _shape(rank: LoneRank) -> GptShape | None:
    """Return the model's shape; a stock run may train a model that has none."""
    from megatron.core.utils import unwrap_model

    from megatron_ext.params import live_model

    chunk = unwrap_model(rank.model[0])
    try:
        return live_model.shape_of(chunk) if live_model.has_shape(chunk) else None
    except UserError:
        return None  # `_view` says why, where that matters


def _parts(view: ParameterView) -> list[LayerPart]:
    """Return what the rank's layers are made of, those of multi-token prediction too."""
    layers = {entry.tensor.layer for entry in view.entries if entry.tensor.layer is not None}
    units = {entry.unit for entry in view.entries}
    predicting = [depth for depth in range(view.shape.mtp_num_layers) if prediction_unit(depth) in units]
    found = [part for layer in sorted(layers) for part in view.shape.parts_of(layer)]
    return found + list(view.shape.prediction_parts) * len(predicting)


def _parameters(shape: GptShape, topk: int) -> tuple[int, int]:
    """Return the elements of the whole model, and of those the ones that a token meets."""
    trained = [tensor for tensor in gpt_parameters(shape) if tensor.kind == "parameter"]
    total = sum(tensor.numel for tensor in trained)
    routed = sum(tensor.numel for tensor in trained if tensor.is_expert)
    return total, total - routed + (routed * topk // shape.num_moe_experts if shape.num_moe_experts else 0)


def _patches(features: Sequence[Feature]) -> dict[str, int]:
    """Return how many patches the run will apply: at its start, and for each feature, each patch counted once."""
    left = {patch.name for patch in registry().applied} - {patch.name for patch in own_patches()}
    if not any(feature.name == "cpu" for feature in features):
        # This process needs the CPU backend, the run does not.
        left -= {patch.name for patch in cpu.patches()}
    found = {}
    for feature in features:
        own = {patch.name for patch in feature.required_patches()} & left
        found[feature.name] = len(own)
        left -= own
    return {"start": len(left), **found}
