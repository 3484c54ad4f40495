# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages by Megatron's own options, which speak of home, and what guests have then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.params import ParamsError, uneven_layers
from megatron_ext.phrases import as_option

__all__ = ["stage_flags", "stages_of_guest", "stages_of_home"]

_FIELDS = {
    "num_layers_per_virtual_pipeline_stage": "vpp",
    "num_virtual_stages_per_pipeline_rank": "vpp",
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
    "account_for_embedding_in_pipeline_split": "stage_layers",
    "account_for_loss_in_pipeline_split": "stage_layers",
    "pipeline_model_parallel_layout": "stage_layers",
    "microbatch_group_size_per_vp_stage": "micro_batch_group",
}
"""Megatron's options on stages, by their names in the namespace, and the field of a strategy that says the same."""

_FLAGS = {name: as_option(name) for name in _FIELDS}
_FLAGS["microbatch_group_size_per_vp_stage"] = "--microbatch-group-size-per-virtual-pipeline-stage"


def stage_flags(args: Any) -> dict[str, str]:
    """Return the flags on stages that a command line has, each with the field of a strategy that says the same."""
    return {_FLAGS[name]: field for name, field in _FIELDS.items() if getattr(args, name) not in (None, False)}


def stages_of_home(home: Strategy, args: Any) -> Strategy:
    """Return home with the stages that the command line gives it.

    Args:
        home: with its sizes, and without stages.
        args: Megatron's arguments as parsed.

    Raises:
        ParamsError: the options do not fit each other, or the sizes; it names them.
    """
    if not args.num_layers:
        return home
    try:
        return replace(_stages(home, args), micro_batch_group=args.microbatch_group_size_per_vp_stage)
    except ParamsError as error:
        raise ParamsError(f"{error}; change {', '.join(stage_flags(args))}") from None


def stages_of_guest(guest: Strategy, home: Strategy, num_layers: int) -> Strategy:
    """Return a guest with its stages: home's, where it has as many; else one chunk each, as even as layers divide.

    What is left over goes to the stages in the middle first, because the first one has the embedding as well, and never
    to the last one, which has the logits.

    Args:
        guest: with its sizes, and without stages.
        home: with its stages.
        num_layers: decoder layers of the model.
    """
    if guest.pp == home.pp:
        return replace(guest, vpp=home.vpp, stage_layers=home.stage_layers, micro_batch_group=home.micro_batch_group)
    share, over = divmod(num_layers, guest.pp)
    if not over or not share:
        return guest
    layers = [share] * guest.pp
    for stage in [*range(1, guest.pp - 1), 0][:over]:
        layers[stage] += 1
    return replace(guest, stage_layers=tuple(layers))


def _stages(home: Strategy, args: Any) -> Strategy:
    if args.pipeline_model_parallel_layout is not None:
        layers = _layers_of_text(args.pipeline_model_parallel_layout)
        if len(layers) % home.pp:
            raise ParamsError(f"the layout has {len(layers)} stages, which {home.pp} pipeline ranks cannot share")
        return replace(home, vpp=len(layers) // home.pp, stage_layers=layers)
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    vpp = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        size = args.num_layers_per_virtual_pipeline_stage * home.pp
        vpp, over = divmod(args.num_layers + embedding + loss, size) if size > 0 else (0, 1)
        if over:
            raise ParamsError(f"{args.num_layers} layers cannot be cut into chunks of that size on {home.pp} stages")
    home = replace(home, vpp=1 if vpp is None else vpp)
    if home.vpp < 1 or not (embedding or loss or first is not None or last is not None):
        return home
    if home.pp == 1:
        raise ParamsError("a pipeline of one stage has nothing to divide unevenly")
    layers = uneven_layers(
        args.num_layers,
        pp=home.pp,
        vpp=home.vpp,
        first=first,
        last=last,
        embedding_counts=embedding,
        loss_counts=loss,
    )
    return replace(home, stage_layers=layers)


def _layers_of_text(text: str) -> tuple[int, ...]:
    """Return the decoder layers of each chunk that a text such as `Ett|tt|ttL` lists."""
    # Imported here because it imports Megatron, whose import the command line tools can do without.
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        chunks = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError as error:
        raise ParamsError(str(error)) from None
    if any(kind.name == "mtp" for chunk in chunks[:-1] for kind in chunk):
        raise ParamsError("layers for multi-token prediction (m) are moved between strategies in the last stage only")
    return tuple(sum(kind.name == "decoder" for kind in chunk) for chunk in chunks)
