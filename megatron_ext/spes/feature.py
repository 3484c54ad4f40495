# SPDX-License-Identifier: Apache-2.0
"""SPES as a feature of a Megatron run: what other peers own is frozen. The sync service's feature does the rest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError, combine
from megatron_ext.hooks import (
    ChunksBuilt,
    Feature,
    LoadContext,
    SaveContext,
    SavesState,
    StepEnd,
    StepStart,
    TrainStart,
    WeighsExperts,
    on,
)
from megatron_ext.params import ParameterView
from megatron_ext.patching import Patch
from megatron_ext.seams import checkpoint, router, training
from megatron_ext.seams.arguments import add_config_group, say
from megatron_ext.seams.optimizer_format import refuse_states_by_place
from megatron_ext.seams.sharded_state import ask_for_some_experts, is_model_key, unstack_experts
from megatron_ext.spes.arguments import (
    argument_problems,
    complete_arguments,
    frozen_problems,
    names_of_arguments,
    ownership_of,
)
from megatron_ext.spes.config import SpesConfig
from megatron_ext.spes.grouped_experts import train_some_experts
from megatron_ext.spes.held import held_bytes
from megatron_ext.spes.load_balance import count_weights, decayed_factor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SpesFeature"]

_STATE = "spes"


class SpesFeature(Feature, WeighsExperts, SavesState):
    """Freezes experts before anything is made for their training."""

    name = "spes"

    def __init__(self) -> None:
        self._args: Any = None
        self._weighed: TrainStart | None = None
        self._expert_weights: Tensor | None = None
        self._factor = 1.0
        self._device: Any = "cpu"
        self._has_frozen = False
        self._takes_of_all = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the group of a SPES peer's options."""
        add_config_group(parser, SpesConfig, "spes (experts shared out to peers of the sync service)")
        # What is not given stays open until the file was read.
        parser.set_defaults(**dict.fromkeys(names_of_arguments()))
        file = parser.add_argument_group("spes, from a file")
        file.add_argument(
            "--spes-config",
            metavar="FILE",
            default=None,
            help="YAML file with using_spes and spes_config; what the command line gives replaces what it says",
        )

    def complete_arguments(self, args: Any) -> None:
        """Take over what the file says."""
        complete_arguments(args)

    def enabled(self, args: Any) -> bool:
        """Return whether this job trains a part of the experts."""
        return bool(args.using_spes)

    def validate(self, args: Any) -> list[str]:
        """Check the options."""
        return argument_problems(args)

    def adjust_arguments(self, args: Any) -> list[str]:
        """Log the chosen options."""
        ownership = ownership_of(args)
        assert ownership is not None
        # A file of strategies has said meanwhile what home's sizes are.
        problems = frozen_problems(args, ownership)
        if problems:
            raise combine(problems, "--hot-switch-strategy-file, the first strategy")
        owned = ownership.owned_by(args.sync_service_index)
        return [f"spes: trains {len(owned)} of {ownership.experts} experts: {_listed(owned)}"]

    def required_patches(self) -> Sequence[Patch]:
        """Return the seams of freezing, of the routers' loss and of the optimizer's checkpoints."""
        return [*training.chunk_patches(), *training.loop_patches(), *router.patches(), *checkpoint.patches()]

    def expert_weights(self, experts: int) -> Tensor | None:
        """Let this peer's own experts look less loaded at first, where that was asked for."""
        return self._expert_weights

    @on(ChunksBuilt)
    def on_chunks_built(self, context: ChunksBuilt) -> None:
        """Freeze the experts that others own, in the chunks that are trained and in those of guests."""
        ownership = ownership_of(context.args)
        assert ownership is not None
        frozen = 0
        for entry in ParameterView.from_model(context.chunks).entries:
            if not ownership.is_trained(entry.tensor.name, context.args.sync_service_index):
                entry.parameter.requires_grad_(False)
                frozen += entry.parameter.numel()
        for chunk in context.chunks:
            train_some_experts(chunk)
        if not self._has_frozen:
            say(f"spes: {frozen} parameters of this rank are frozen")
        self._has_frozen = True

    def save_state(self, context: SaveContext) -> None:
        """Let the optimizer's state hold the experts that it trains, in a checkpoint and in the request of a read."""
        ownership = ownership_of(context.args)
        assert ownership is not None
        owned = ownership.owned_by(context.args.sync_service_index)
        has_all = len(owned) == ownership.experts
        if not context.loading:
            context.state[_STATE] = {"trained": list(owned)}
        # In the legacy format an optimizer's state is of what it trains, by place.
        if context.optimizer is not None and not has_all and context.files is None:
            adapt = ask_for_some_experts if context.loading and self._takes_of_all else unstack_experts
            # Entries next to the optimizer's state have its form: that of workers inside the peer.
            for key, entry in context.state.items():
                if not is_model_key(key):
                    adapt(entry)

    def load_state(self, context: LoadContext) -> None:
        """Take the states of the own experts out of an optimizer that trained all, and refuse those of other experts.

        Megatron may take these for the own ones: the distributed optimizer's state may be named by its place in a
        buffer, and not by the parameter.

        Raises:
            UserError: the checkpoint's optimizer trained other experts, or its states of these cannot be told apart.
        """
        saved, args = context.state.pop(_STATE, None), context.args
        if not context.common_only or context.directory is None or args.no_load_optim or args.finetune:
            return
        if context.release or getattr(context.state.get("args"), "no_save_optim", False):
            return
        ownership = ownership_of(args)
        assert ownership is not None
        owned = list(ownership.owned_by(args.sync_service_index))
        everyone = list(range(ownership.experts))
        trained = everyone if saved is None else saved["trained"]
        self._takes_of_all = trained == everyone != owned
        if self._takes_of_all:
            refuse_states_by_place(context)
        elif trained != owned:
            raise UserError(
                f"--load {context.directory}: its optimizer trained the experts {_listed(trained)}, and this peer "
                f"trains {_listed(owned)}; give this peer its own checkpoint or one of a job that trained all experts, "
                "or take the weights alone with --no-load-optim"
            )

    def check_load(self, context: LoadContext) -> None:
        """Refuse the optimizer of a part of the experts to a run that trains all of them.

        Raises:
            UserError: with the way out.
        """
        saved, args = context.state.get(_STATE), context.args
        if saved is None or args.no_load_optim or args.finetune or args.skip_train:
            return
        if saved["trained"] != list(range(args.num_experts or 0)):
            raise UserError(
                f"--load {context.directory}: a SPES peer saved it, whose optimizer trained the experts "
                f"{_listed(saved['trained'])} alone; take its weights with --no-load-optim, or resume as that peer "
                "with --using-spes and its --sync-service options"
            )

    @on(TrainStart)
    def on_train_start(self, context: TrainStart) -> None:
        """Keep what the steps need: by now Megatron knows how long the training is."""
        self._args = context.args
        self._weighed = context
        self._device = next((value.device for chunk in context.model for value in chunk.parameters()), "cpu")

    @on(StepStart)
    def on_step_start(self, step: StepStart) -> None:
        """Bring the weights of the load-balancing loss up to date."""
        args = self._args
        config, ownership = SpesConfig.from_args(args), ownership_of(args)
        if config.using_decayed_aux_loss and ownership is not None:
            owned = ownership.owned_by(args.sync_service_index)
            factor = decayed_factor(step.iteration, args.train_iters, config.decayed_factor_update_steps)
            if factor != self._factor:
                self._factor = factor
                weights = None if factor == 1 else count_weights(ownership.experts, owned, factor)
                self._expert_weights = weights if weights is None else weights.to(self._device)

    @on(StepEnd)
    def on_step_end(self, step: StepEnd) -> None:
        """Log the memory of training these experts once; before the first step there are no optimizer states."""
        if not step.completed or self._weighed is None:
            return
        held = held_bytes(self._weighed.model, self._weighed.optimizer)
        if held.optimizer == 0:  # fp16 skips the first steps
            return
        say(f"spes: this rank has {held.gradients} bytes of gradients and {held.optimizer} bytes of optimizer states")
        self._weighed = None


def _listed(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts))
