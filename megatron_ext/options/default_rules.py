# SPDX-License-Identifier: Apache-2.0
"""Megatron's options that have no row: what is taken for granted of them, and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["DEFAULT_RULES", "DefaultRule", "rule_of"]


@dataclass(frozen=True, kw_only=True)
class DefaultRule:
    """Options that every feature accepts, with no test named for any of them."""

    reason: str
    """Why nothing more needs to be known."""

    patterns: tuple[str, ...] = ()
    """Shell patterns of their flags."""

    groups: tuple[str, ...] = ()
    """Titles of groups of Megatron's parser, of which it holds for all options that no pattern matches."""


# Megatron makes its parser of 700 options up to three times in one start.
@functools.cache
def rule_of(flag: str, group: str) -> DefaultRule | None:
    """Return the rule that holds for an option without a row, None where there is none.

    Args:
        flag: the option.
        group: title of the group of Megatron's parser that has it.
    """
    for rule in DEFAULT_RULES:
        if any(fnmatchcase(flag, pattern) for pattern in rule.patterns):
            return rule
    for rule in DEFAULT_RULES:
        if group in rule.groups:
            return rule
    return None


DEFAULT_RULES: tuple[DefaultRule, ...] = (
    DefaultRule(
        reason=(
            "a value that the optimizer or its schedule reads; each worker has an optimizer and a schedule like any job"
        ),
        patterns=(
            "--lr",
            "--min-lr",
            "--decoupled-lr",
            "--decoupled-min-lr",
            "--lr-decay-*",
            "--lr-wsd-*",
            "--lr-warmup-*",
            "--warmup",
            "--override-opt_param-scheduler",
            "--use-checkpoint-opt_param-scheduler",
            "--start-weight-decay",
            "--end-weight-decay",
            "--weight-decay*",
            "--no-weight-decay-cond-type",
            "--apply-wd-to-qk-layernorm",
            "--clip-grad",
            "--adam-*",
            "--muon-*",
            "--lion-*",
            "--no-use-layer-wise-param-layout",
            "--sgd-momentum",
            "--fp16",
            "--bf16",
            "--loss-scale*",
            "--initial-loss-scale",
            "--min-loss-scale",
            "--hysteresis",
            "--accumulate-allreduce-grads-in-fp32",
            "--check-for-large-grads",
            "--log-num-zeros-in-grad",
            "--config-logger-dir",
            "--no-barrier-with-level-1-timing",
        ),
    ),
    DefaultRule(
        reason="it is read only with an option that is refused",
        patterns=(
            "--optimizer-offload-fraction",
            "--use-torch-optimizer-for-cpu-offload",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--no-pin-cpu-*",
            "--main-grads-dtype",
            "--main-params-dtype",
            "--exp-avg-*",
            "--megatron-fsdp-*",
            "--fsdp-*",
            "--data-parallel-sharding-strategy",
            "--outer-dp-sharding-strategy",
            "--enable-full-sharding-in-hsdp",
            "--no-gradient-reduce-div-fusion",
            "--suggested-communication-unit-size",
            "--keep-fp8-transpose-cache",
            "--torch-fsdp2-no-reshard-after-forward",
            "--no-strict-fsdp-dtensor-load",
            "--disable-symmetric-registration",
            "--sharp-enabled-group",
            "--async-*",
            "--use-persistent-ckpt-worker",
            "--ckpt-convert-*",
            "--non-persistent-local-*",
            "--replication*",
            "--no-stream-ckpt-dequant",
        ),
    ),
    DefaultRule(
        reason="it says where and when a checkpoint is written or read, which the rows on formats cover",
        patterns=(
            "--save",
            "--save-interval",
            "--load",
            "--ckpt-step",
            "--non-persistent-global-ckpt-dir",
            "--no-use-tokenizer-model-from-checkpoint-args",
        ),
    ),
    DefaultRule(
        reason="it is an old spelling that Megatron warns of or refuses",
        patterns=(
            "--use-dist-ckpt",
            "--dist-ckpt-format",
            "--ckpt-fully-parallel-save",
            "--model-parallel-size",
        ),
    ),
    DefaultRule(
        reason="it says how ranks meet or what is recorded of it, not what they compute",
        patterns=(
            "--distributed-timeout-*",
            "--local-rank",
            "--flight-recorder-*",
            "--no-flight-recorder-*",
        ),
    ),
    DefaultRule(
        reason="it concerns tensor, pipeline or context parallelism, which is inside a worker",
        patterns=(
            "--no-overlap-p2p-communication",
            "--cp-comm-type",
            "--disable-jit-fuser",
            "--attention-softmax-in-fp32",
            "--fp16-lm-cross-entropy",
            "--mamba-training-ssm-states-dtype",
            "--fp8-recipe",
        ),
    ),
    DefaultRule(
        reason="it is inside the model, whose tensors every feature takes as they are, or refuses by their names",
        groups=(
            "transformer configuration",
            "network size",
            "mla",
            "moe",
            "experimental",
            "experimental_attention_variant",
            "RNG and initialization",
        ),
    ),
    DefaultRule(
        reason=(
            "it says how long a run trains, on what, and what it evaluates, which every feature reads as Megatron does"
        ),
        groups=(
            "training",
            "validation",
            "data and dataloader",
            "tokenizer",
        ),
    ),
    DefaultRule(
        reason="it says what is recorded of a run, or damages one on purpose, not what is trained",
        groups=(
            "logging",
            "profiling",
            "one logger",
            "straggler",
            "workload inspector",
            "rerun engine",
            "fault injector",
            "msc",
            "Logits Distillation",
        ),
    ),
    DefaultRule(
        reason="it is read only with an option that has a row",
        groups=(
            "In-process restart",
            "ft_package",
            "autoresume",
            "sft",
        ),
    ),
    DefaultRule(
        reason="another program reads it: inference, reinforcement learning, retrieval or vision",
        groups=(
            "inference",
            "rl",
            "biencoder",
            "vision",
        ),
    ),
)
"""Every rule. Options of the areas that features depend on most (data parallelism, optimizers, checkpoints) need a row
or a pattern; a group does not do for them (`tests/options/test_parser.py`)."""
