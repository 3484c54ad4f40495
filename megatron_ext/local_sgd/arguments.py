# SPDX-License-Identifier: Apache-2.0
"""What is wrong with local SGD's options in a given run, and what the user should be told about them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.meetings.config import MeetingsConfig
from megatron_ext.local_sgd.one_worker import changed_flags, makes_rounds, one_worker_problems
from megatron_ext.local_sgd.streaming import StreamingConfig, fragment_problem
from megatron_ext.options import asks_to_switch, refusals
from megatron_ext.outer.codecs.all_codecs import build_codec, takes_density
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.phrases import plural
from megatron_ext.seams.optimizer_format import reshardable_problems

__all__ = ["argument_problems", "complete_arguments", "ending_notice", "notices"]

_IN_WORDS = {"lr": "learning rate", "momentum": "momentum"}

def complete_arguments(args: Any) -> None:
    """Make as many workers as there can be where their number is not given, as atorch does.

    Args:
        args: Megatron's argument namespace; changed in place.

    Raises:
        UserError: there can only be one.
    """
    # With strategies the number says which ranks they are for, so that it cannot follow from them.
    switches = asks_to_switch(args)
    if not args.use_local_sgd or args.local_sgd_workers is not None or switches:
        return
    smallest = args.tensor_model_parallel_size * args.context_parallel_size
    if args.num_experts:
        smallest = math.lcm(smallest, _expert_tensor_size(args) * args.expert_model_parallel_size)
    smallest *= args.pipeline_model_parallel_size
    # Where it does not divide, Megatron or `_shape_problems` says why.
    args.local_sgd_workers = max(args.world_size // smallest, 1)
    if args.world_size == smallest:
        raise UserError(
            f"--use-local-sgd: TP, PP, CP and EP take all of the {args.world_size} processes, which are one worker; "
            "start more, or give --local-sgd-workers 1 to train without outer rounds (with an outer optimizer that is "
            "given as well, such as --outer-optimizer-lr 0.7, in outer rounds of one worker)"
        )


def argument_problems(args: Any, feature: str) -> list[str]:
    """Return the problems, one sentence each.

    Args:
        args: Megatron's argument namespace.
        feature: the name of local SGD in the table of options.
    """
    config, outer = LocalSGDConfig.from_args(args), OuterOptimizerConfig.from_args(args)
    gta = GTAConfig.from_args(args)
    streaming = StreamingConfig.from_args(args)
    problems = config.problems()
    if not config.use_local_sgd:
        return problems + [
            f"{flag} has no effect without --use-local-sgd; add it or drop the option"
            for flag in changed_flags(streaming, outer, gta, MeetingsConfig.from_args(args))
        ]
    problems += method_problems(config, outer, gta, streaming, Where.JOB)
    if config.sync_in_forward:
        problems += refusals(args, feature, "--local-sgd-sync-in-forward")
    problems += MeetingsConfig.from_args(args).problems(config)
    if config.use_async:
        problems += refusals(args, feature, "--local-sgd-use-async") + _alone_problems(args)
    if config.local_sgd_workers == 1:
        steps = makes_rounds(args)
        problems += one_worker_problems(outer, streaming, gta, config, steps=steps)
        if not steps:
            return problems
        problems += _lone_problems(args)
    too_many = fragment_problem(streaming.fragments, args.num_layers, "--num-layers") if args.num_layers else None
    if too_many is not None:
        problems.append(too_many)
    problems += _shape_problems(args, config) + reshardable_problems(args)
    if gta.in_pairs:
        problems += refusals(args, feature, "--local-sgd-pseudo-grad-reducer pairwise")
    if streaming.eager:
        problems += refusals(args, feature, "--local-sgd-eager-updates")
    length, said = args.train_iters, f"--train-iters {args.train_iters}"
    if length is None and args.train_samples is not None and args.global_batch_size:
        length, said = args.train_samples // args.global_batch_size, f"--train-samples {args.train_samples}"
    if length is not None and config.local_sgd_warmup_steps >= length:
        problems.append(
            f"--local-sgd-warmup-steps {config.local_sgd_warmup_steps} leaves no local step before "
            f"{said}; lower the one or raise the other"
        )
    elif length is not None and not config.use_async and not outer.problems() and config.local_sgd_sync_interval > 0:
        rounds = (length - config.local_sgd_warmup_steps) // config.local_sgd_sync_interval
        problems += outer.length_problems(rounds) if rounds else []
    return problems + refusals(args, feature)


def _lone_problems(args: Any) -> list[str]:
    """Return which other features do not go with outer steps of a single worker."""
    others = {
        "--hot-switch-strategies": asks_to_switch(args),
        "--sync-service": args.sync_service is not None,
        "--using-spes": args.using_spes,
    }
    return [
        f"--local-sgd-workers 1 with an outer optimizer is not combined with {other} yet; drop one of them"
        for other, is_given in others.items()
        if is_given
    ]


def _alone_problems(args: Any) -> list[str]:
    """Return which other features do not go with rounds by time."""
    others = {
        "strategies that are switched, whose orders of sequences are those of all workers together": (
            asks_to_switch(args)
        ),
        "--sync-service, whose rounds are counted in iterations of all": args.sync_service is not None,
        "--using-spes, whose rounds are counted in iterations of all": args.using_spes,
    }
    return [
        f"--local-sgd-use-async is not combined with {other}; drop one of them"
        for other, is_given in others.items()
        if is_given
    ]


def notices(args: Any) -> list[str]:
    """Return what was chosen, and what may surprise, one line each; the options are known to be good."""
    config, outer = LocalSGDConfig.from_args(args), OuterOptimizerConfig.from_args(args)
    every = f"{config.local_sgd_sync_interval} steps"
    if config.use_async:
        every = f"{config.local_sgd_sync_time:g} seconds, that is, in every iteration of Megatron's log,"
    lines = [
        f"local SGD: {plural(config.local_sgd_workers or 0, 'worker')}, an outer round every "
        f"{every} after {config.local_sgd_warmup_steps} synchronous iterations, "
        f"outer optimizer {_said(outer)}, evaluation on the "
        + ("synced weights" if config.local_sgd_evaluation == "synced" else "workers' own weights")
    ]
    if outer.outer_optim_class is not None and "lr" not in outer.outer_optim_kwargs:
        lines.append(
            f"local SGD: --outer-optim-kwargs has no lr, so the default of {outer.name} holds; torch's are made for "
            'inner steps (DiLoCo takes SGD with {"lr": 0.7, "momentum": 0.9, "nesterov": true})'
        )
    if args.save and args.no_save_optim:
        lines.append(
            "local SGD: --no-save-optim: checkpoints have the weights of the last round, whatever steps came after it, "
            "and none of them resumes this run"
        )
    streaming = StreamingConfig.from_args(args)
    if streaming.eager:
        lines.append(
            "local SGD: eager updates: every worker steps by its own share at once, by the others' one round later; "
            "the last iteration makes all workers equal"
        )
    elif streaming.active:
        lines.append(
            f"local SGD: streaming {streaming.fragments} {streaming.pattern} fragments, each with one round per "
            f"interval, applied {streaming.sync_delay} steps after it began, with alpha {streaming.update_alpha:g}; "
            "the last iteration makes all workers equal"
        )
    if config.cpu_offload and not torch.cuda.is_available():
        lines.append("local SGD: --local-sgd-cpu-offload saves nothing on CPU, where it only copies")
    gta = GTAConfig.from_args(args)
    if gta.reducer == "gta" and gta.consensus_method is None and gta.sparsification_method is None:
        lines.append(
            "local SGD: --local-sgd-pseudo-grad-reducer gta is the weighted mean without "
            "--local-sgd-pseudo-grad-consensus or --local-sgd-pseudo-grad-sparsification"
        )
    if gta.sparsification_method is not None and gta.density == 1:
        lines.append(
            "local SGD: --local-sgd-pseudo-grad-sparsification keeps everything at --local-sgd-pseudo-grad-density 1"
        )
    if config.local_sgd_sync_interval == 1 and not config.use_async:
        lines.append("local SGD: --local-sgd-sync-interval is 1, so workers meet at every step")
    if takes_density(config.codec) and outer.momentum > 0:
        lines.append(
            f"local SGD: what --local-sgd-codec {config.codec} keeps back acts like momentum; with the outer "
            "optimizer's on top training may overshoot (SparseLoCo uses --outer-optimizer-momentum 0)"
        )
    tied = _tied_notice(args, config.codec, gta.sparsification_method is not None)
    if tied is not None:
        lines.append(tied)
    if config.skip_anomaly and getattr(args, "check_for_nan_in_loss_and_grad", False):
        lines.append(
            "local SGD: a non-finite gradient still ends the run, before a round could leave the worker out; "
            "--no-check-for-nan-in-loss-and-grad lets it continue"
        )
    return lines


def _said(outer: OuterOptimizerConfig) -> str:
    """Return which outer optimizer is in force; the default does not average the weights, as atorch's does."""
    if outer == OuterOptimizerConfig():
        return "sgd (DiLoCo's default: lr 0.7, momentum 0.9, Nesterov; --outer-optimizer none averages the weights)"
    changing = [f"{_IN_WORDS[option]} by rounds {text}" for option, text in outer.schedules.items()]
    return ", ".join([outer.name, *changing])


def ending_notice(
    train_iters: int | None,
    done: int,
    since: int,
    interval: int,
    *,
    skipped: Collection[int] = (),
    weights_alone: bool = False,
) -> str | None:
    """Return what to say when training is going to end between two rounds.

    Args:
        train_iters: of the run.
        done: iterations that lie behind, warm-up included.
        since: steps of them since the last round.
        interval: steps from one round to the next.
        skipped: iterations in which Megatron makes no step.
        weights_alone: whether checkpoints have those of the last round alone.
    """
    if train_iters is None or train_iters <= done:
        return None
    steps = since + train_iters - done - sum(done < iteration <= train_iters for iteration in set(skipped))
    rest = steps % interval
    if not rest:
        return None
    if steps < interval:
        return (
            f"local SGD: no round falls into this run: --train-iters {train_iters} ends {plural(rest, 'step')} into an "
            f"interval of {interval} (--local-sgd-sync-interval), and every worker keeps weights of its own"
        )
    what = "holds every worker apart and cannot be read without --use-local-sgd"
    if weights_alone:
        what = "has that round's weights, without these steps (--no-save-optim)"
    end = f"--train-iters {train_iters} ends {plural(rest, 'step')} after a round"
    return f"local SGD: {end}; a checkpoint saved there {what}"


def _shape_problems(args: Any, config: LocalSGDConfig) -> list[str]:
    """Return why the workers do not fit the run's parallel layout."""
    workers = config.local_sgd_workers
    if workers is None or workers < 1:
        return []
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if args.world_size % model:
        return []  # Megatron names this one itself.
    data = args.world_size // model
    if data % workers:
        divisors = ", ".join(str(count) for count in range(2, data + 1) if data % count == 0) or "none above 1"
        return [
            f"--local-sgd-workers {workers} does not divide the data-parallel size {data} (world size "
            f"{args.world_size} / TP*PP*CP {model}); possible numbers of workers: {divisors}"
        ]
    expert = _expert_tensor_size(args) * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    if args.num_experts and (args.world_size // workers) % expert:
        return [
            f"--local-sgd-workers {workers} leaves {args.world_size // workers} ranks per worker, which does not hold "
            f"a whole expert-parallel group (ETP*EP*PP = {expert}); use fewer workers or a smaller expert parallel size"
        ]
    sizes = {"data": data // workers * args.context_parallel_size}
    if args.num_experts:
        sizes["expert data"] = args.world_size // workers // expert
    instances = args.num_distributed_optimizer_instances
    return [
        f"--num-distributed-optimizer-instances {instances} does not divide the {what}-parallel size of a worker, "
        f"{size}; instances are parts of each worker"
        for what, size in sizes.items()
        if size % instances
    ]


def _expert_tensor_size(args: Any) -> int:
    return int(getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size)


def _tied_notice(args: Any, codec: str | None, sparsified: bool) -> str | None:
    """Return how a tied embedding is treated that two pipeline stages hold, where others are treated otherwise."""
    if args.pipeline_model_parallel_size == 1 or args.untie_embeddings_and_output_weights:
        return None
    exceptions = []
    if codec is not None and build_codec(codec).grid > 1:
        exceptions.append(f"travels in bf16 instead of {codec}")
    if sparsified:
        exceptions.append("keeps all of its elements in every round")
    if not exceptions:
        return None
    return (
        f"local SGD: the tied embedding, which two pipeline stages hold, {' and '.join(exceptions)}, so that both "
        "copies stay equal (--untie-embeddings-and-output-weights lifts this)"
    )
