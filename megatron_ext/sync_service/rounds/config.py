# SPDX-License-Identifier: Apache-2.0
"""Configuration of a run: who meets when, and what is done with their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.config_options import in_field_names
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.outer_optimizer import outer_optimizer_problems
from megatron_ext.outer.penalty_config import PenaltyConfig
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.spes import MergeConfig
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.durations import LONGEST_SECONDS, can_be_waited
from megatron_ext.sync_service.protocol.limits import Limits
from megatron_ext.sync_service.rounds.members import MOST_PEERS, Policy

__all__ = ["RunConfig"]

_PENALTY = (
    "skip_anomaly",
    "ewma_alpha",
    "ewma_warmup_steps",
    "ewma_threshold",
    "ewma_relative",
    "ewma_relearn_rounds",
    "pseudo_gradnorm_reduce",
    "weight_softmax_temperature",
    "weight_scale_free",
    "clip_pseudo_grad",
    "step_weight_ratio",
)
"""Fields of a run that are local SGD's."""

_REDUCER = tuple(entry.name for entry in fields(GTAConfig))
"""Fields of a run that say how pseudo-gradients become one."""

_OUTER = (
    "outer_optimizer",
    "outer_optimizer_lr",
    "outer_optimizer_momentum",
    "outer_optimizer_nesterov",
    "outer_optimizer_lr_schedule",
    "outer_optimizer_momentum_schedule",
)
"""Fields of a run that are the outer optimizer's."""

_LIMITS = tuple(entry.name for entry in fields(Limits))
"""Fields of a run that are limits to what one peer announces and uploads."""

_ROUNDS = ("synchronous", "asynchronous")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: how many peers meet, when a round closes, and what is done with their values."""

    peers: int
    """Places for peers. Peers cut the data into that many parts, so the number stays the same for the whole run."""

    quorum: int | None = None
    """Uploads without which no round closes; all peers unless given."""

    grace_seconds: float = 60.0
    """How long a round stays open for slow peers after the quorum is reached."""

    rounds: str = "synchronous"
    """'synchronous': a round is of all peers, or of a quorum of them. 'asynchronous': every contribution is a round of
    its own, made when it comes, and nobody waits."""

    contributions_per_step: int | None = None
    """Of asynchronous rounds: how many contributions make up one outer step (N of delayed Nesterov). Each counts 1/N at
    once; the momentum is applied with the N-th. The number of peers unless given."""

    step_weights: bool = False
    """Weight a contribution by its peer's steps in the interval: among those of a synchronous round, or beside all
    peers' last ones where rounds are asynchronous."""

    token_weights: bool = False
    """The same by tokens, which are steps times the samples of a step: `--seq-length` is the same for all peers."""

    step_weight_ratio: float = 0.5
    """With pseudo_gradnorm_reduce and step_weights or token_weights: their share of the weights; the rest is that of
    those by norms."""

    max_staleness: int | None = None
    """Of asynchronous rounds: a contribution does not count when more rounds have been made since the values that it
    started from; no limit unless given."""

    max_norm: float | None = None
    """A contribution whose pseudo-gradient has a larger L2 norm does not count; no limit unless given."""

    outer_optimizer: str = "none"
    """'none' for the mean of the peers' values (FedAvg), or what `--outer-optimizer` takes: 'sgd' is DiLoCo's."""

    outer_optimizer_lr: float | None = None
    """Outer learning rate: 0.7 for sgd unless given; the others need one of their own."""

    outer_optimizer_momentum: float = 0.9
    """Momentum of the outer sgd."""

    outer_optimizer_nesterov: bool = True
    """Nesterov momentum in the outer sgd."""

    outer_optimizer_lr_schedule: str | None = None
    """Outer learning rate by rounds, in place of outer_optimizer_lr: pairs ROUND:VALUE, such as
    "1:0.1,10:0.7,90:0.7,100:0.1". It goes from one to the next in a straight line, and stays at the last."""

    outer_optimizer_momentum_schedule: str | None = None
    """Momentum of the outer sgd by rounds, in place of outer_optimizer_momentum, in the same form."""

    sync_steps: int | None = None
    """Steps between two rounds, if they are to be the same for all peers; merging counts in steps."""

    merge_interval: int | None = None
    """Steps between two merges of experts (SPES), which happen in rounds; none unless given. Needs sync_steps."""

    merge_alpha_start: float = 0.01
    """How much an expert takes over at step 0, a fraction of 0 to 1."""

    merge_decay_steps: int = 10000
    """Steps in which that goes down to 0."""

    merge_topk: int = 4
    """From how many experts an expert takes over, those that it resembles most."""

    merge_like_official: bool = False
    """Where there are no more experts than merge_topk, count an expert among its own models, as the paper's code
    does."""

    skip_anomaly: bool = False
    """Leave peers whose pseudo-gradient is anomalously large out of a round, unit by unit (EDiT)."""

    ewma_alpha: float = 0.02
    """Weight of the newest norm in the anomaly detector's moving mean and variance."""

    ewma_warmup_steps: int = 120
    """Rounds before the detector leaves anybody out."""

    ewma_threshold: float = 3.0
    """Standard deviations above the mean at which a norm is anomalous."""

    ewma_relative: bool = False
    """Let the detector follow norms divided by their median over the peers."""

    ewma_relearn_rounds: int = 3
    """Rounds in which a norm that most peers share is rejected, after which it is a new level; 0 for never."""

    pseudo_gradnorm_reduce: bool = False
    """Weight the peers by softmax(-norm / temperature) of their pseudo-gradients, unit by unit."""

    weight_softmax_temperature: float | None = None
    """Temperature of those weights; 1.0 unless given."""

    weight_scale_free: bool = False
    """Divide the norms by their mean over the peers before the softmax."""

    clip_pseudo_grad: float | None = None
    """Clip the common pseudo-gradient of what all peers train to this norm, unit by unit."""

    reducer: str | None = None
    """How the pseudo-gradients of what all peers train become one: 'linear' (the weighted mean, as when none is given)
    or 'gta' (generalized task arithmetic), or that of another package. What owners train is their mean with any."""

    consensus_method: str | None = None
    """With gta: every element keeps only the peers on the majority's side, decided by the 'sum' of the pseudo-gradients
    or by the 'count' of their signs."""

    sparsification_method: str | None = None
    """With gta: keep only a part of each peer's pseudo-gradient of a tensor: its largest elements ('magnitude'), or
    random ones ('random'; 'rescaled_random' divides them by the density)."""

    normalize: bool = True
    """Divide by the weights that were summed."""

    density: float = 1.0
    """Fraction of the elements that sparsification keeps, in (0, 1]."""

    int8_mask: bool = False
    """Compare signs as 8-bit integers, to save memory."""

    max_tensors: int = 200_000
    """Tensors that a peer may announce."""

    max_tensor_bytes: int = 32 << 30
    """Bytes (of fp32) of one tensor that a peer may announce."""

    max_model_bytes: int = 16 << 40
    """Bytes (of fp32) of all tensors that a peer may announce."""

    max_frames: int | None = None
    """Frames of one contribution. Unless given 4096, besides 64 for every tensor and one for every 4 KiB of fp32."""

    max_boxes: int = 65_536
    """Boxes, slices that its ranks hold, in which one peer may upload one tensor."""

    max_journal_bytes: int = 64 << 20
    """Bytes that the journal may grow by between two rounds and still take registrations: what peers that register
    again and again write of the disk."""

    check_disk: bool = True
    """When a run begins, refuse tensors of which the server's disk has no room for a round."""

    @property
    def policy(self) -> Policy:
        """When a round closes."""
        quorum = self.peers if self.quorum is None else self.quorum
        return Policy(
            peers=self.peers,
            quorum=1 if self.is_asynchronous else quorum,
            grace_seconds=self.grace_seconds,
            is_asynchronous=self.is_asynchronous,
            max_staleness=self.max_staleness,
            weighs_tokens=self.token_weights,
        )

    @property
    def place(self) -> Where:
        """Where its rounds are made, as reducers, codecs and outer optimizers call it."""
        return Where.ASYNCHRONOUS if self.is_asynchronous else Where.SERVER

    @property
    def is_asynchronous(self) -> bool:
        """Whether every contribution is a round of its own."""
        return self.rounds == "asynchronous"

    @property
    def outer(self) -> OuterOptimizerConfig:
        """The outer optimizer."""
        return OuterOptimizerConfig(**{name: getattr(self, name) for name in _OUTER})

    @property
    def reducing(self) -> GTAConfig:
        """How pseudo-gradients become one, as local SGD calls it."""
        return GTAConfig(**{name: getattr(self, name) for name in _REDUCER})

    @property
    def merging(self) -> MergeConfig | None:
        """When experts are merged, and how much; None for never."""
        if self.merge_interval is None:
            return None
        return MergeConfig(
            interval=self.merge_interval,
            alpha_start=self.merge_alpha_start,
            decay_steps=self.merge_decay_steps,
            topk=self.merge_topk,
            like_official=self.merge_like_official,
        )

    @property
    def penalty(self) -> PenaltyConfig:
        """What decides who counts in a round, and how much, as local SGD calls it."""
        by_interval = self.step_weights or self.token_weights
        return PenaltyConfig(**{name: getattr(self, name) for name in _PENALTY}, use_step_weight=by_interval)

    @property
    def limits(self) -> Limits:
        """What one peer may announce and upload."""
        return Limits(**{name: getattr(self, name) for name in _LIMITS})

    @property
    def contributions_of_step(self) -> int | None:
        """How many contributions make up one outer step where each comes alone; None where they meet."""
        return (self.contributions_per_step or self.peers) if self.is_asynchronous else None

    def judges(self, catalog: Catalog) -> bool:
        """Return whether it has to be decided who counts in a round, and how much; otherwise all do alike.

        Where contributions come one by one, that of one among several owners counts as one of as many as contribute.

        Args:
            catalog: the tensors.
        """
        penalty = self.penalty
        is_shared_out = self.is_asynchronous and any(len(spec.owners) > 1 for spec in catalog)
        return penalty.has_penalty or penalty.use_step_weight or is_shared_out

    def merge_step(self, number: int) -> int:
        """Return the steps of every peer after which a round is made that may merge experts; 0 for none.

        Where contributions come one by one, such rounds are those in which all peers have made as many on average.

        Args:
            number: of the round.
        """
        times, rest = divmod(number, self.peers if self.is_asynchronous else 1)
        return 0 if rest else times * (self.sync_steps or 0)

    def problems(self) -> list[str]:
        """Return the problems of the values, one sentence each."""
        found = []
        for name, allowed, rule in (
            ("peers", 1 <= self.peers <= MOST_PEERS, f"it must be 1 to {MOST_PEERS}"),
            ("quorum", self.quorum is None or 1 <= self.quorum <= self.peers, f"it must be 1 to peers ({self.peers})"),
            (
                "grace_seconds",
                can_be_waited(self.grace_seconds, or_zero=True),
                f"it must be a number of seconds, 0 to {LONGEST_SECONDS:.0f} (a month)",
            ),
            ("max_norm", self.max_norm is None or 0 < self.max_norm < math.inf, "it must be above 0"),
            ("rounds", self.rounds in _ROUNDS, f"it must be {' or '.join(_ROUNDS)}"),
            (
                "contributions_per_step",
                self.contributions_per_step is None or self.contributions_per_step >= 1,
                "it must be 1 or more",
            ),
            ("max_staleness", (self.max_staleness or 0) >= 0, "it must be 0 or more"),
            ("sync_steps", self.sync_steps is None or self.sync_steps >= 1, "it must be 1 or more"),
            *((name, (getattr(self, name) or 0) >= 1, "it must be 1 or more") for name in self._given(*_LIMITS)),
        ):
            if not allowed:
                found.append(f"{name} is {getattr(self, name)}; {rule}")
        found += _as_fields(outer_optimizer_problems(self.outer, self.place), OuterOptimizerConfig, _OUTER)
        found += _as_fields(self.penalty.penalty_problems(self.peers), PenaltyConfig, _PENALTY)
        reducing = self.reducing.type_problems() or self.reducing.problems(self.penalty, self.place)
        found += _as_fields(reducing, GTAConfig, _REDUCER)
        found += self._weight_problems()
        found += self._merge_problems()
        return found + self._asynchronous_problems()

    def _asynchronous_problems(self) -> list[str]:
        if not self.is_asynchronous:
            return [
                f"{name} is of asynchronous rounds, and rounds is {self.rounds}; change that or drop {name}"
                for name in self._given("contributions_per_step", "max_staleness")
            ]
        found = [
            f"{name} has no meaning with asynchronous rounds, which wait for nobody; drop it"
            for name in self._given("quorum", "grace_seconds")
        ]
        if self.outer_optimizer == "sgd" and not self.outer_optimizer_nesterov:
            found.append(
                "asynchronous rounds have delayed Nesterov for an outer optimizer: use outer_optimizer sgd (with "
                "outer_optimizer_momentum 0 for none of it) or none"
            )
        return found

    def _weight_problems(self) -> list[str]:
        found = []
        weights = self._given("step_weights", "token_weights")
        if len(weights) == 2:
            found.append("step_weights and token_weights are two weights of one contribution; drop one of them")
        if self._given("step_weight_ratio") and not (weights and self.pseudo_gradnorm_reduce):
            found.append(
                "step_weight_ratio has no effect without pseudo_gradnorm_reduce and step_weights or token_weights; add "
                "them or drop it"
            )
        return found

    def _given(self, *names: str) -> list[str]:
        """Return which fields differ from their defaults."""
        return [name for name in names if getattr(self, name) != self.__dataclass_fields__[name].default]

    def _merge_problems(self) -> list[str]:
        if self.merging is None:
            given = self._given("merge_alpha_start", "merge_decay_steps", "merge_topk", "merge_like_official")
            return [f"{name} has no effect without merge_interval; add it or drop {name}" for name in given]
        found = self.merging.problems()
        if self.sync_steps is None:
            found.append("merge_interval needs sync_steps, the steps between two rounds; add it")
        return found


def _as_fields(problems: Sequence[str], config: Any, names: Sequence[str]) -> list[str]:
    """Return what a configuration with flags complains of, in the words of this one's file."""
    named = {name: config.__dataclass_fields__[name] for name in names}
    return [in_field_names(problem, named, off="{}: false") for problem in problems]
