# SPDX-License-Identifier: Apache-2.0
"""A feature: the norm of the trained parameters in the iteration line, of every layer in TensorBoard and wandb."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hooks import Feature, TrainingLog, TrainStart, on
from megatron_ext.params import ParameterView
from megatron_ext.patching import Patch
from megatron_ext.seams import logging, training
from megatron_ext.seams.optimizer import InnerValues


class ParameterNorm(Feature):
    """Adds up the squares of the optimizer's fp32 values, each of which is counted on one rank."""

    name = "parameter-norm"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add `--parameter-norm-interval`."""
        group = parser.add_argument_group("parameter norm")
        group.add_argument(
            "--parameter-norm-interval",
            type=int,
            metavar="N",
            help="log the norm of the trained parameters, and that of every layer, every N iterations",
        )

    def enabled(self, args: Any) -> bool:
        """Return whether there is an interval."""
        return args.parameter_norm_interval is not None

    def validate(self, args: Any) -> list[str]:
        """Check the interval."""
        interval = args.parameter_norm_interval
        if interval is None:
            return []
        problems = []
        if interval < 1 or interval % args.log_interval:
            problems.append(
                f"--parameter-norm-interval {interval}: give a positive multiple of --log-interval {args.log_interval}"
            )
        if args.use_local_sgd:
            problems.append("--parameter-norm-interval: workers of local SGD would wait for its sum; leave it out")
        return problems

    def required_patches(self) -> Sequence[Patch]:
        """Return what raises the events that are handled here."""
        return [*training.loop_patches(), *logging.patches()]

    @on(TrainStart)
    def on_train_start(self, event: TrainStart) -> None:
        """Find this rank's values; the view knows which layer each is of, and which of equal copies counts."""
        self._interval = event.args.parameter_norm_interval
        self._device = next(event.model[0].parameters()).device
        view = ParameterView.from_model(event.model)
        self._units = view.units()
        self._inner = InnerValues(event.optimizer, view)

    @on(TrainingLog)
    def on_training_log(self, log: TrainingLog) -> None:
        """Append the norms."""
        if log.iteration % self._interval:
            return
        squares = torch.zeros(len(self._units), dtype=torch.float64, device=self._device)
        for value in self._inner.values:
            if value.entry.placed.counts_once(is_shard=self._inner.is_shard(value)):
                squares[self._units.index(value.entry.unit)] += value.tensor.double().square().sum()
        dist.all_reduce(squares)
        log.fields.append(("parameter norm", f"{float(squares.sum().sqrt()):.3f}"))
        for unit, norm in zip(self._units, squares.sqrt().tolist(), strict=True):
            log.scalars[f"parameter-norm/{unit}"] = norm
