# SPDX-License-Identifier: Apache-2.0
"""Hot switching as a feature of a Megatron run."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import (
    AddsLayouts,
    BuilderDone,
    CheckpointRead,
    Feature,
    GroupsBuilt,
    ReplacesSchedule,
    TrainingLog,
    TrainStart,
    hooks,
    on,
)
from megatron_ext.hot_switch.arguments import adjust_arguments, argument_problems, strategies_of, take_home
from megatron_ext.hot_switch.config import HotSwitchConfig
from megatron_ext.hot_switch.data.batches import BatchReader
from megatron_ext.hot_switch.data.training_documents import open_documents
from megatron_ext.hot_switch.model_config import attention_of, refused_config
from megatron_ext.hot_switch.runtime import prediction_losses
from megatron_ext.hot_switch.runtime.loading import order_changes, refuse_other_vocabulary
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList
from megatron_ext.params import Layout
from megatron_ext.patching import Patch
from megatron_ext.run_options import run_options
from megatron_ext.seams import (
    attention,
    checkpoint,
    latent_attention,
    logging,
    model,
    norms,
    router,
    strategies,
    training,
)
from megatron_ext.seams.arguments import add_config_group, say

__all__ = ["HotSwitchFeature"]

_MIB = 2**20


class HotSwitchFeature(Feature, AddsLayouts, ReplacesSchedule):
    """Wires the switching step to Megatron's groups, model builder, loop and log."""

    name = "hot-switch"

    def __init__(self) -> None:
        self._strategies: StrategyList | None = None
        self._home: Any = None
        self._guests: list[Any] = []
        self._step: Any = None
        self._worker: Any = None
        self._profiles = False
        self._order_changes: list[str] = []

    # Arguments.

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the group of hot switching."""
        add_config_group(parser, HotSwitchConfig, "hot switching")

    def enabled(self, args: Any) -> bool:
        """Return whether strategies are given; a single one reads the same data and switches nothing."""
        return HotSwitchConfig.from_args(args).active

    def complete_arguments(self, args: Any) -> None:
        """Take home's sizes from the strategies."""
        if self.enabled(args):
            take_home(args)

    def validate(self, args: Any) -> list[str]:
        """Check the strategies, and the options that hot switching does not go with."""
        return argument_problems(args, self.name)

    def adjust_arguments(self, args: Any) -> list[str]:
        """Make the run home's, and say so."""
        self._strategies = strategies_of(args)
        return adjust_arguments(args, self._strategies)

    def required_patches(self) -> Sequence[Patch]:
        """Return the seams that hot switching uses."""
        return [
            *strategies.patches(),
            *model.patches(),
            *training.loop_patches(),
            *training.length_patches(),
            *logging.patches(),
            *checkpoint.load_patches(),
            *router.padding_patches(),
            *router.document_patches(),
            *prediction_losses.patches(),
            *norms.patches(),
            *attention.patches(),
            *latent_attention.patches(),
        ]

    def guest_layouts(self, args: Any) -> Sequence[Layout]:
        """Return the guests' layouts."""
        return [strategy.layout(args.num_layers) for strategy in self._require_strategies().strategies[1:]]

    # The run.

    @on(CheckpointRead)
    def on_checkpoint_read(self, context: CheckpointRead) -> None:
        """Refuse a checkpoint from which losses would be others."""
        if context.common_only:
            if self._strategies is not None:
                refuse_other_vocabulary(context, [strategy.tp for strategy in self._strategies.strategies])
            self._order_changes = order_changes(context)

    @on(GroupsBuilt, always=False)  # workers of local SGD, if there are any
    def on_groups_built(self, event: GroupsBuilt) -> None:
        """Switch inside each worker of local SGD."""
        from megatron_ext.hot_switch.runtime.step import WorkerPlace

        groups = event.groups
        self._worker = WorkerPlace(index=groups.worker, count=groups.num_workers, group=groups.inside)

    @on(BuilderDone)
    def on_builder_done(self, context: BuilderDone) -> None:
        """Build the guests as home was built."""
        # Imported here because it imports Megatron, whose import the command line tools can do without.
        import torch

        from megatron_ext.hot_switch.runtime.document_attention import attend_by_document
        from megatron_ext.hot_switch.runtime.guest import SwitchOptions
        from megatron_ext.hot_switch.runtime.guest_builder import build_guest
        from megatron_ext.hot_switch.runtime.placed_model import PlacedModel, frozen_names
        from megatron_ext.hot_switch.transfer.executor import default_sizes

        config = HotSwitchConfig.from_args(run_options())
        if found := refused_config(run_options(), context.config):
            raise UserError("; ".join(found))
        if not context.trains:
            if self._require_strategies().home.cp > 1:
                for chunk in context.model:
                    attend_by_document(chunk)
            return
        group = self.place().group
        sizes = default_sizes(group)
        if config.hot_switch_direct_bytes is not None:
            sizes = replace(sizes, direct_bytes=config.hot_switch_direct_bytes)
        states = strategies.parallel_states()
        listed = self._require_strategies().strategies
        self._home = PlacedModel(listed[0], states[0], context.model, attention=attention_of(run_options()))
        options = SwitchOptions(
            group=group,
            gpus_per_node=config.hot_switch_gpus_per_node,
            algorithm=config.hot_switch_algorithm,
            attention=self._home.attention,
            sizes=sizes,
            frozen=frozen_names(self._home.view, group),
        )
        self._guests = []
        for strategy, state in zip(listed[1:], states[1:], strict=True):
            guest = build_guest(
                strategy,
                state,
                context,
                home=self._home.view,
                before=self._guests[-1] if self._guests else None,
                options=options,
            )
            self._guests.append(guest)
        if torch.cuda.is_available():
            # Megatron built guests on a stream of their own, whose memory no other stream could reuse.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        for guest, after in pairwise([*self._guests, None]):
            say(_ways(guest, after))

    @on(TrainStart)
    def on_train_start(self, context: TrainStart) -> None:
        """Open the data, and let home's gradients be those of all strategies."""
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

        from megatron_ext.hot_switch.runtime.step import SwitchingStep

        if self._home is None:
            raise UserError(
                "hot switching builds guests the way Megatron's GPTModelBuilder builds home, but the model was built "
                "by a model_provider; give pretrain() the model's config, as Megatron's pretrain_gpt.py does"
            )
        listed = self._require_strategies()
        index, count = hooks.data_part(context.args)
        packs = self._home.attention != "padded"
        documents = open_documents(context.args)
        reader = BatchReader(documents, listed, seed=context.args.seed, part=(index, count), packs=packs)
        part = f", of which this job reads part {index} of {count}" if count > 1 else ""
        say(
            f"hot switching: {reader.sequences_per_epoch} sequences per epoch{part}, "
            f"{get_current_running_global_batch_size()} per step, {context.args.consumed_train_samples} read before"
        )
        for line in self._order_changes:
            say(line)
        self._profiles = HotSwitchConfig.from_args(context.args).hot_switch_profile
        self._step = SwitchingStep(self._home, self._guests, reader, self.place(), profiles=self._profiles)
        self._step.install(context.config)

    def forward_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the switching step in place of home's schedule."""
        return functools.partial(self._step.run, original)

    @on(TrainingLog)
    def on_training_log(self, log: TrainingLog) -> None:
        """Report how much the step trained, how much of it was padding, and what switching took."""
        batch = self._step.last_batch
        if batch is None:
            return
        if log.printing:
            log.fields.append(("tokens", str(self._step.lengths.sum())))
            log.fields.append(("padding", f"{batch.padding_ratio:.1%}"))
            if self._guests:
                log.fields.append(("switching (ms)", f"{1000 * self._step.switches.seconds:.1f}"))
            if self._profiles:
                for line in self._step.switches.lines():
                    say(line)
        if log.writing:
            log.scalars["hot-switch/padding-ratio"] = batch.padding_ratio
            log.scalars["hot-switch/tokens"] = int(self._step.lengths.sum())
            log.scalars["hot-switch/switching-seconds"] = self._step.switches.seconds
            for switch in self._step.switches.done:
                log.scalars[f"hot-switch/seconds of {switch.title}"] = switch.seconds

    def lengths_of_step(self) -> Sequence[int] | None:
        """Return the lengths of all workers' documents, which every rank can work out."""
        return None if self._step is None else [int(length) for length in self._step.lengths]

    @property
    def guests(self) -> tuple[Any, ...]:
        """The guests of this rank, in the order in which they run; none before the model is built."""
        return tuple(self._guests)

    @property
    def strategies(self) -> StrategyList:
        """Home and the guests, once the arguments are validated."""
        return self._require_strategies()

    def place(self) -> Any:
        """Return this rank's worker; the whole job is one where local SGD does not cut it."""
        import torch.distributed as dist

        from megatron_ext.hot_switch.runtime.step import WorkerPlace

        return self._worker or WorkerPlace(index=0, count=1, group=dist.group.WORLD)

    def _require_strategies(self) -> StrategyList:
        assert self._strategies is not None, "hot switching: arguments are not validated yet"
        return self._strategies


def _ways(guest: Any, after: Any) -> str:
    """Say where a guest's parameters come from, and where its gradients go.

    Args:
        guest: the guest.
        after: the one that runs after it; None for the last.
    """
    source, taken = "home", guest.from_home
    if guest.may_follow:
        source, taken = f"guest {guest.before.strategy.label}", guest.from_before
    target, sent, instead = "home", guest.to_home, ""
    # Gradients are fp32, plans count in the parameters' type.
    factor = 4 / taken.tensors[0].tensor.dtype.itemsize / _MIB
    if after is not None and after.takes_gradients:
        target, sent = f"to guest {after.strategy.label}", after.gradients_from_before
        instead = f" ({guest.to_home.bytes_moved * factor:.1f} MiB to home)"
    return (
        f"hot switching: guest {guest.strategy.label} takes {taken.bytes_moved / _MIB:.1f} MiB of parameters from "
        f"{source} and sends {sent.bytes_moved * factor:.1f} MiB of gradients {target}{instead}, all ranks together"
    )
