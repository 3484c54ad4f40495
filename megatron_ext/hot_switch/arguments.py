# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments in a run with hot switching: their problems, and the values that they get."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatron_ext.batch_size import schedule_problem, sizes_problem
from megatron_ext.errors import UserError
from megatron_ext.hot_switch.config import ATTENTIONS, HotSwitchConfig
from megatron_ext.hot_switch.data.conversations import conversation_problems
from megatron_ext.hot_switch.data.corpora import check_corpora, training_corpora
from megatron_ext.hot_switch.model_config import attention_of, circumstance_of
from megatron_ext.hot_switch.model_shape import shape_of
from megatron_ext.hot_switch.planning.plan import MOST_GPUS_PER_NODE
from megatron_ext.hot_switch.planning.senders import ALGORITHMS
from megatron_ext.hot_switch.strategies.guest_experts import experts_fit, experts_of_guest
from megatron_ext.hot_switch.strategies.pipeline_stages import stage_flags, stages_of_guest, stages_of_home
from megatron_ext.hot_switch.strategies.strategy import Strategy
from megatron_ext.hot_switch.strategies.strategy_checks import sizes_are_usable
from megatron_ext.hot_switch.strategies.strategy_file import read_strategy_file
from megatron_ext.hot_switch.strategies.strategy_list import StrategyList, check_strategies, parse_strategies
from megatron_ext.options import refusals
from megatron_ext.options.asked import attention_variant, has_linear_layers
from megatron_ext.params import ParamsError

__all__ = ["adjust_arguments", "argument_problems", "strategies_of", "take_home"]

_MOST_BYTES = 1 << 40
"""Of what is sent at once: a terabyte, more than any memory of a GPU."""


def argument_problems(args: Any, feature: str) -> list[str]:
    """Return the problems, one sentence each.

    Args:
        args: Megatron's arguments as parsed.
        feature: the name of hot switching in the table of options.
    """
    config = HotSwitchConfig.from_args(args)
    if not config.active:
        given, defaults = config.by_flag(), HotSwitchConfig().by_flag()
        return [
            f"{flag} has no effect without --hot-switch-strategies or --hot-switch-strategy-file; add one of them or "
            "drop the option"
            for flag, value in given.items()
            if value != defaults[flag]
        ]
    problems = _list_problems(args, config)
    per_node = config.hot_switch_gpus_per_node
    if not 1 <= per_node <= MOST_GPUS_PER_NODE:
        problems.append(f"--hot-switch-gpus-per-node is {per_node}; it must be 1 to {MOST_GPUS_PER_NODE}")
    elif _ranks(args) > per_node and _ranks(args) % per_node:
        problems.append(
            f"--hot-switch-gpus-per-node is {per_node}, but {_ranks(args)} ranks do not fill such nodes; set it to "
            "the number of ranks that share a node"
        )
    if config.hot_switch_direct_bytes is not None and not 0 <= config.hot_switch_direct_bytes <= _MOST_BYTES:
        problems.append(
            f"--hot-switch-direct-bytes is {config.hot_switch_direct_bytes}; it must be 0 to {_MOST_BYTES}"
        )
    if config.hot_switch_algorithm not in ALGORITHMS:
        problems.append(
            f"--hot-switch-algorithm {config.hot_switch_algorithm} is not known; use one of {', '.join(ALGORITHMS)}"
        )
    attention = attention_of(args)
    if attention not in ATTENTIONS:
        problems.append(f"--hot-switch-attention {attention} is not known; use one of {', '.join(ATTENTIONS)}")
    if getattr(args, "local_sgd_sync_in_forward", False):
        problems.append(
            "--local-sgd-sync-in-forward is not supported with hot switching: guests need the synced weights before "
            "home's forward pass; drop it"
        )
    if attention in ATTENTIONS:
        problems += refusals(args, feature, circumstance_of(args))
    return problems + _corpus_problems(args) + refusals(args, feature)


def _corpus_problems(args: Any) -> list[str]:
    """Return the problems of the data files, which Megatron opens before this run's own reader does."""
    if args.mock_data and not args.sft:
        return []
    try:
        named = training_corpora(args)
        if args.sft:
            return conversation_problems(args, named.prefixes, named.option)
        return check_corpora(named)
    except UserError as error:
        return [str(error)]


def strategies_of(args: Any) -> StrategyList:
    """Return the strategies and buckets of a run.

    Args:
        args: Megatron's arguments, before `adjust_arguments`.

    Raises:
        UserError: with all problems and their fixes.
    """
    config = HotSwitchConfig.from_args(args)
    if config.hot_switch_strategy_file is not None:
        return _from_file(args, Path(config.hot_switch_strategy_file))
    parsed, problems = parse_strategies(config.hot_switch_strategies or ())
    # What Megatron's flags say about a layout's details, they say about all strategies.
    strategies = [
        strategy
        and replace(
            strategy,
            sequence_parallel=bool(args.sequence_parallel) and strategy.tp > 1,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
            etp=args.expert_tensor_parallel_size,
            micro_batch_size=1 if args.micro_batch_size is None else args.micro_batch_size,
            recompute=_recomputes(args) or "none",
        )
        for strategy in parsed
    ]
    strategies = _for_guests(args, strategies, problems)
    return check_strategies(
        strategies,
        config.hot_switch_bucket_sizes or (),
        world_size=_ranks(args),
        whose_ranks=_whose(args),
        seq_length=args.seq_length,
        shape=shape_of(args),
        problems=problems,
    )


def _for_guests(args: Any, strategies: list[Strategy | None], problems: list[str]) -> list[Strategy | None]:
    """Return the strategies with what Megatron's options say about home alone, and with what guests have then."""
    home = strategies[0] if strategies else None
    if home is None or not args.num_layers or not all(sizes_are_usable(each) for each in strategies if each):
        return strategies  # there is something else to complain about
    about = {"has_experts": bool(args.num_experts), "stages_before_replicas": args.use_tp_pp_dp_mapping}
    strategies = [home, *(each and experts_of_guest(each, home, **about) for each in strategies[1:])]
    try:
        home = stages_of_home(home, args)
    except ParamsError as error:
        problems.append(f"strategy {home.label}: {error}")
        return strategies
    return [home, *(each and stages_of_guest(each, home, args.num_layers) for each in strategies[1:])]


def _from_file(args: Any, path: Path) -> StrategyList:
    if not path.is_file():
        raise UserError(f"--hot-switch-strategy-file {path}: there is no such file; give the path of a YAML file")
    listed = read_strategy_file(
        path, world_size=_ranks(args), whose_ranks=_whose(args), seq_length=args.seq_length, shape=shape_of(args)
    )
    if not listed.buckets:
        raise UserError(
            f"hot-switch strategies: {path}: there is no list 'bucket_sizes'; give the bounds of the buckets down to 0"
        )
    return listed


def take_home(args: Any) -> None:
    """Give Megatron home's sizes before any feature looks at them, unless they contradict what else was asked for.

    Args:
        args: Megatron's arguments as parsed.
    """
    try:
        home = strategies_of(args).home
    except UserError:
        return  # Validation says why.
    sizes = {
        "tensor_model_parallel_size": home.tp,
        "pipeline_model_parallel_size": home.pp,
        "context_parallel_size": home.cp,
    }
    if all(getattr(args, name) in (1, size) for name, size in sizes.items()):
        vars(args).update(sizes)


def adjust_arguments(args: Any, strategies: StrategyList) -> list[str]:
    """Give Megatron home's layout and what hot switching needs; return a line to print for each change."""
    home = strategies.home
    lines = [
        "hot switching: home "
        + " then ".join(
            f"{strategy.label} for {bucket.above} < positions <= {bucket.up_to}"
            for strategy, bucket in zip(strategies.strategies, strategies.buckets, strict=True)
        ).replace(" then ", ", guests " if len(strategies.strategies) > 2 else ", guest ", 1)
    ]
    if attention_of(args) == "padded" and args.hot_switch_attention is None:
        lines.append(
            "hot switching: --hot-switch-attention is padded: in a packed row Gated DeltaNet would carry its state "
            "from a document into the next one"
        )
    if args.hot_switch_strategy_file is not None:
        lines += _take_from_file(args, home)
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        lines.append("hot switching: --calculate-per-token-loss is set: all tokens of a step count alike")
    if args.ddp_average_in_collective:
        args.ddp_average_in_collective = False
        lines.append(
            "hot switching: --ddp-average-in-collective is dropped: gradients are sums, divided by the tokens of all "
            "strategies"
        )
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        lines.append("hot switching: --accumulate-allreduce-grads-in-fp32 is set: guests' gradients are added in fp32")
    if args.rerun_mode != "disabled":
        lines.append(f"hot switching: --rerun-mode {args.rerun_mode} becomes 'disabled'")
        args.rerun_mode = "disabled"
    if args.masked_softmax_fusion:
        args.masked_softmax_fusion = False
        lines.append("hot switching: --no-masked-softmax-fusion is set: the fused kernel ignores documents' masks")
    if home.cp > 1 and args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        lines.append("hot switching: --no-create-attention-mask-in-dataloader is set: home cuts rows")
    # Megatron pads the vocabulary to a multiple of this times home's tensor parallel size.
    common = math.lcm(args.make_vocab_size_divisible_by * home.tp, *(each.tp for each in strategies.strategies))
    if common // home.tp != args.make_vocab_size_divisible_by:
        args.make_vocab_size_divisible_by = common // home.tp
        lines.append(
            f"hot switching: --make-vocab-size-divisible-by becomes {args.make_vocab_size_divisible_by}, so that every "
            "strategy can divide the vocabulary"
        )
    return lines


def _take_from_file(args: Any, home: Strategy) -> list[str]:
    """Take what the file says about home in place of Megatron's own options; return a line about it."""
    args.sequence_parallel = home.sequence_parallel
    args.micro_batch_size = home.micro_batch_size
    args.num_virtual_stages_per_pipeline_rank = home.vpp if home.vpp > 1 else None
    stages_text = home.stages_text(args.mtp_num_layers or 0)
    args.pipeline_model_parallel_layout = stages_text
    if stages_text is not None:
        args.num_virtual_stages_per_pipeline_rank = None  # the text says it
    args.microbatch_group_size_per_vp_stage = home.micro_batch_group
    args.decoder_first_pipeline_num_layers = home.first_stage_layers
    args.decoder_last_pipeline_num_layers = home.last_stage_layers
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = home.ep, home.etp
    args.recompute_granularity = None if home.recompute == "none" else home.recompute
    if home.recompute == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
    return [
        f"hot switching: the file says for home: sequence parallelism {'on' if home.sequence_parallel else 'off'}, "
        f"--micro-batch-size {home.micro_batch_size}, {home.vpp} model chunks per stage, "
        + "".join(
            f"{count} layers in the {which} stage, "
            for which, count in (("first", home.first_stage_layers), ("last", home.last_stage_layers))
            if count is not None
        )
        + ("" if stages_text is None else f"--pipeline-model-parallel-layout '{stages_text}', ")
        + f"expert parallel size {home.ep}, recompute {home.recompute}"
    ]


def _connection_problems(strategies: Sequence[Strategy]) -> list[str]:
    """Return the problems of guests that Megatron's own check, which looks at home alone, would report."""
    import torch
    from megatron.training.utils import common_utils

    cut = [strategy.label for strategy in strategies[1:] if strategy.tp > 1 or strategy.cp > 1]
    if not cut or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" or not torch.cuda.is_available():
        return []
    if common_utils.get_device_arch_version() >= 10:  # Blackwell
        return []
    return [
        f"strategy {cut[0]}: on this GPU tensor and context parallelism need the environment variable "
        "CUDA_DEVICE_MAX_CONNECTIONS to be 1; export it before the start"
    ]


def _batch_problems(args: Any, home: Strategy) -> list[str]:
    """Return why Megatron could not count home's micro-batches, although a step's rows are made by length."""
    batch, whole = args.global_batch_size, _workers(args) * home.dp * home.micro_batch_size
    workers = f" times {_workers(args)} workers" if _workers(args) > 1 else ""
    factors = f"home's dp {home.dp} times its micro-batch size {home.micro_batch_size}{workers}"
    if schedule_problem(args) is None and (scheduled := sizes_problem(args, whole, factors)) is not None:
        return [scheduled]
    if batch is None or batch % whole == 0 or args.decrease_batch_size_if_needed:
        return []
    near = max(batch // whole, 1) * whole
    return [
        f"--global-batch-size is {batch}, which is not a multiple of {factors}: Megatron counts home's "
        f"micro-batches by it; give {near} or {near + whole}"
    ]


def _recomputes(args: Any) -> Literal["selective", "full"] | None:
    """Return the kind of recomputation; Megatron makes the one option of the other only later."""
    granularity: Literal["selective", "full"] | None = args.recompute_granularity
    return "selective" if args.recompute_activations else granularity


def _expert_bias_problems(args: Any, strategies: Sequence[Strategy]) -> list[str]:
    """Return under which strategies Megatron does not train experts whose layers have biases."""
    problems = []
    for strategy in strategies:
        etp = strategy.expert_tp
        if etp > 1:
            where, ways_out = f"on etp = {etp} ranks", "etp 1"
        elif strategy.ep == 1 and args.transformer_impl == "local":
            # There autograd refuses to add a bias to what is a view of its input.
            where, ways_out = "without expert parallelism on its local implementation", "an ep above 1"
        else:
            continue
        problems.append(
            f"strategy {strategy.label}: Megatron does not train experts with biases {where}; use {ways_out}, or give "
            "--disable-bias-linear"
        )
    return problems


def _with_sequence_parallelism_alone(args: Any) -> Iterator[str]:
    """Yield what Megatron does under tensor parallelism with sequence parallelism alone, of what the model needs."""
    if args.num_experts:
        yield "trains experts under tensor parallelism"
    if attention_variant(args) == "gated_delta_net":
        yield "all-reduces the gradients of Gated DeltaNet's norms over tensor-parallel ranks"


def _heterogeneous_problems(args: Any, strategies: Sequence[Strategy]) -> list[str]:
    """Return what Megatron 0.19 does not do with layers of a heterogeneous model."""
    problems = [
        f"strategy {strategy.label}: Megatron does not build heterogeneous layers in virtual stages; use vpp 1"
        for strategy in strategies
        if strategy.vpp > 1
    ]
    if has_linear_layers(args):
        problems += [
            f"strategy {strategy.label}: Megatron gathers the outputs of linear layers along another axis with "
            "sequence parallelism, and its first step fails; leave sequence parallelism out"
            for strategy in strategies
            if strategy.tp > 1 and strategy.sequence_parallel
        ]
    return problems


def _list_problems(args: Any, config: HotSwitchConfig) -> list[str]:
    problems = []
    if config.hot_switch_strategy_file is not None:
        problems += [
            f"{option} is not read with --hot-switch-strategy-file; drop it, and write {field} into the file"
            for option, field, given in (
                ("--hot-switch-strategies", "strategies", config.hot_switch_strategies),
                ("--hot-switch-bucket-sizes", "bucket_sizes", config.hot_switch_bucket_sizes),
                ("--sequence-parallel", "each strategy's sequence_parallel", args.sequence_parallel),
                ("--recompute-activations", "each strategy's recompute", args.recompute_activations),
                ("--recompute-granularity", "each strategy's recompute", args.recompute_granularity),
                ("--expert-model-parallel-size", "each strategy's ep", args.expert_model_parallel_size != 1),
                ("--expert-tensor-parallel-size", "each strategy's etp", args.expert_tensor_parallel_size),
                *((flag, f"home's {field}", True) for flag, field in stage_flags(args).items()),
            )
            if given
        ]
    elif config.hot_switch_bucket_sizes is None:
        problems.append(
            "--hot-switch-strategies needs --hot-switch-bucket-sizes: the longest sequence of every strategy from "
            "--seq-length down, then 0"
        )
    try:
        listed = strategies_of(args)
    except UserError as error:
        if args.use_local_sgd and args.local_sgd_workers != _workers(args):
            return problems  # Local SGD says why; how many ranks strategies are for is not known until then.
        # Without bucket sizes the list has its own complaint about their number.
        return problems or [str(error)]
    home = listed.home
    problems += _connection_problems(listed.strategies) + _batch_problems(args, home)
    problems += [
        f"strategy {strategy.label}: Megatron {what} only with sequence parallelism; add --sequence-parallel, or "
        "sequence_parallel: true in --hot-switch-strategy-file"
        for what in _with_sequence_parallelism_alone(args)
        for strategy in listed.strategies
        if strategy.tp > 1 and not strategy.sequence_parallel
    ]
    if args.heterogeneous_layers_config_path is not None:
        problems += _heterogeneous_problems(args, listed.strategies)
    if args.num_experts and args.add_bias_linear:
        problems += _expert_bias_problems(args, listed.strategies)
    if args.use_tp_pp_dp_mapping:
        problems += [
            f"strategy {strategy.label}: with --use-tp-pp-dp-mapping Megatron needs as many replicas of experts as of "
            f"the rest where there are several stages, but etp*ep is {strategy.expert_tp * strategy.ep} and tp*cp is "
            f"{strategy.tp * strategy.cp}; make them equal, or drop --use-tp-pp-dp-mapping"
            for strategy in listed.strategies
            if not experts_fit(strategy, stages_before_replicas=True)
        ]
    if attention_of(args) == "rows":
        problems += [
            f"strategy {strategy.label}: --hot-switch-attention rows needs whole rows, which context parallelism cuts; "
            "use documents, or padded with Gated DeltaNet"
            for strategy in listed.strategies
            if strategy.cp > 1
        ]
    if home.cp > 1 and args.reset_attention_mask:
        problems.append(
            f"strategy {home.label}: home evaluates with context parallelism, where attention takes no mask; drop "
            "--reset-attention-mask"
        )
    for option, given, wanted in (
        ("--tensor-model-parallel-size", args.tensor_model_parallel_size, home.tp),
        ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size, home.pp),
        ("--context-parallel-size", args.context_parallel_size, home.cp),
    ):
        if given not in (1, wanted):
            problems.append(
                f"{option} is {given}, but the first of --hot-switch-strategies, which is home, says {wanted}; drop "
                f"{option}"
            )
    return problems


def _ranks(args: Any) -> int:
    """Return the ranks that strategies are for: those of a worker, where local SGD cuts the job into some."""
    return int(args.world_size // _workers(args))


def _whose(args: Any) -> str:
    return "the job" if _workers(args) == 1 else f"each of {_workers(args)} workers"


def _workers(args: Any) -> int:
    """Return the number of workers; 1 also where it cannot be, about which local SGD complains."""
    workers = args.local_sgd_workers if args.use_local_sgd else None
    return workers if workers is not None and workers > 0 and args.world_size % workers == 0 else 1
