# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with stock Megatron's loop, model and datasets, and megatron_ext's features on request.

Starts under torchrun, on GPU and on CPU:

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --num-layers 12 ... --data-path PREFIX

It knows dense and MoE GPTs on mock data, .bin/.idx files and conversations (--sft), and attention that stays inside
documents (--dataloader-inter-document-masking). For Megatron's other kinds of data (fill-in-the-middle, logits of a
teacher) run the upstream script through `python -m megatron_ext`.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import argument_utils, get_args, get_timers, inprocess_restart, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_ext import patch_megatron
from megatron_ext.errors import UserError

# A micro-batch whose loss is this many times the largest one seen is reported with --check-for-spiky-loss.
SPIKE_FACTOR = 10

# Options for kinds of data that this script does not read; not every release has all of them.
OTHER_DATA = ("--fim-data", "--hybrid-context-parallel", "--logits-load-dir")

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# Of samples that hold several documents: where these begin, and how long the longest is.
DOCUMENT_FIELDS = ("cu_seqlens", "max_seqlen")

straggler_timer = StragglerDetector()


def main() -> None:
    """Parse the command line and train."""
    patch_megatron()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_other_data(args)
    run_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    # Every rank calls the dataset builder, which decides itself where data is read.
    build_datasets.is_distributed = True
    run_pretrain(
        *config_and_datasets(args),
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )


def config_and_datasets(args: argparse.Namespace) -> tuple[Any, ...]:
    """Return the first arguments of `pretrain`: the configuration, how to build datasets and, up to 0.18, the model."""
    if hasattr(argument_utils, "gpt_config_from_args"):
        kind = "hybrid" if args.hybrid_layer_pattern else "gpt"
        model = getattr(argument_utils, f"{kind}_config_from_args")(args)
        return argument_utils.pretrain_cfg_container_from_args(args, model), build_datasets
    if args.hybrid_layer_pattern:
        raise UserError(
            "--hybrid-layer-pattern: examples/pretrain_gpt.py builds hybrid models from Megatron 0.19 on; "
            "run Megatron's own pretrain_mamba.py with `python -m megatron_ext`"
        )
    from gpt_provider import build_gpt

    return argument_utils.pretrain_cfg_container_from_args(args), build_datasets, build_gpt


def refuse_other_data(args: argparse.Namespace) -> None:
    """Refuse the kinds of data that this script does not read.

    Raises:
        UserError: an option asks for one.
    """
    asked = [option for option in OTHER_DATA if vars(args).get(option[2:].replace("-", "_"))]
    if asked:
        raise UserError(
            f"{', '.join(asked)}: not known to examples/pretrain_gpt.py; "
            "run Megatron's own pretrain_gpt.py with `python -m megatron_ext`"
        )
    if packs_documents(args) and not hasattr(core_utils, "flatten_batch_for_packed_sequences"):
        raise UserError(
            "--sft and --dataloader-inter-document-masking: examples/pretrain_gpt.py packs documents from Megatron "
            "0.19 on; run Megatron's own pretrain_gpt.py with `python -m megatron_ext`"
        )
    if args.sft and args.create_attention_mask_in_dataloader:
        raise UserError(
            "--sft: Megatron's samples of conversations have no attention mask; add "
            "--no-create-attention-mask-in-dataloader"
        )
    if packs_documents(args) and args.context_parallel_size > 1:
        raise UserError(
            "--context-parallel-size: examples/pretrain_gpt.py does not cut samples of several documents; run "
            "Megatron's own pretrain_gpt.py with `python -m megatron_ext`"
        )
    if args.dataloader_type == "external":
        raise UserError(
            "--dataloader-type external: examples/pretrain_gpt.py builds datasets and no loader of its own; use single "
            "or cyclic, or a script whose provider of datasets returns iterators"
        )


def build_datasets(sample_counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets.

    Args:
        sample_counts: how many samples each of the three must have.
        vp_stage: the virtual pipeline stage whose model chunk asks.
    """
    args = get_args()
    print_rank_0("> building the datasets")
    dataset = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset,
        sample_counts,
        partial(reads_data, vp_stage),
        dataset_config(args),
    ).build()


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Translate the command line into Megatron's dataset configuration."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    # Not every release has the field.
    documents = {"inter_document_masking": True} if masks_documents(args) else {}
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        tokenizer=build_tokenizer(args),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        # What to read, and how it is split.
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        sequences_per_dataset=sequences_per_dataset,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        # How it is read.
        path_to_cache=args.data_cache_path,
        object_storage_cache_path=args.object_storage_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        # What a sample holds.
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        **documents,
    )


def masks_documents(args: argparse.Namespace) -> bool:
    """Return whether documents of .bin/.idx files that share a sample are kept apart."""
    return getattr(args, "dataloader_inter_document_masking", False)


def packs_documents(args: argparse.Namespace) -> bool:
    """Return whether samples say where documents begin, so that attention stays inside them."""
    return args.sft or masks_documents(args)


def needs_batch(vp_stage: int | None) -> bool:
    """Return whether the model chunk on this rank looks at tokens or labels, or at where documents begin."""
    return packs_documents(get_args()) or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(vp_stage)


def has_mtp(vp_stage: int | None) -> bool:
    """Return whether the model chunk on this rank has multi-token-prediction layers."""
    args = get_args()
    if not args.mtp_num_layers:
        return False
    config = core_transformer_config_from_args(args)
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def reads_data(vp_stage: int | None) -> bool:
    """Return whether this rank reads samples; the other ranks of its tensor-parallel group receive them."""
    return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch(vp_stage)


def next_batch(samples: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, Any]:
    """Return the next micro-batch on every rank that needs one, cut to this rank's part of the sequence.

    Args:
        samples: the data iterator, None on ranks that do not read.
        vp_stage: the virtual pipeline stage of the model chunk.

    Returns:
        `BATCH_FIELDS` by name, int64 and float32 tensors of shape (micro-batch, sequence); None where not
        needed. Where documents share samples, `DOCUMENT_FIELDS` as well, int32 of shape (1, documents + 1) and (1,),
        and the samples are one behind the other, (1, micro-batch * sequence).
    """
    args = get_args()
    fields = (*BATCH_FIELDS, *DOCUMENT_FIELDS) if packs_documents(args) else BATCH_FIELDS
    if not needs_batch(vp_stage):
        return dict.fromkeys(fields)
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert samples is not None
        sample = next(samples)
        for field in fields:
            value = sample.get(field)
            batch[field] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        packs_documents(args),  # releases name it differently
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if packs_documents(args):
        batch = core_utils.flatten_batch_for_packed_sequences(batch)
    batch = {field: batch.get(field) for field in fields}
    if args.context_parallel_size == 1:
        return batch
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {field: batch[field] for field in fields}


def where_documents_begin(batch: dict[str, Any]) -> dict[str, PackedSeqParams]:
    """Return what attention inside documents is told as a keyword of the forward, and count it for the log.

    Args:
        batch: as `next_batch` returns it.
    """
    if batch.get("cu_seqlens") is None:
        return {}
    starts, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
    update_seqlen_stats_from_cu_seqlens(starts)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )
    return {"packed_seq_params": packed}


def forward_step(
    samples: Iterator[dict[str, torch.Tensor]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run one micro-batch through this rank's model chunk.

    Args:
        samples: the data iterator, None on ranks that do not read.
        model: the wrapped model chunk.
        return_schedule_plan: return the plan of the forward instead (--overlap-moe-expert-parallel-comm).

    Returns:
        The output, on the last stage the loss of every token of shape (micro-batch, sequence), and the
        function that reduces it.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler_timer(bdata=True):
        batch = next_batch(samples, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    loss = partial(masked_loss, batch["loss_mask"])
    with straggler_timer:
        run = model.build_schedule_plan if return_schedule_plan else model
        documents = where_documents_begin(batch)
        return run(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], **documents), loss


def masked_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: 1 for a token that counts, shape (micro-batch, sequence).
        token_losses: the loss of every token, same shape.

    Returns:
        The float32 sum, the int32 number of tokens that count, and both as the pair that Megatron's log
        averages.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    check_loss(loss)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def check_loss(loss: torch.Tensor) -> None:
    """Let Megatron's rerun machinery judge this rank's loss before it is reduced."""
    args = get_args()
    judge = get_rerun_state_machine()
    # The forward is deterministic, so a rerun must give the very same number.
    check = partial(judge.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        check(rejection_func=torch.isnan, message="NaN in the forward loss of this rank", fatal=True)
        check(rejection_func=torch.isinf, message="Inf in the forward loss of this rank", fatal=True)
    if args.check_for_spiky_loss:
        spike = partial(judge.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        check(rejection_func=spike, message="Spiky loss", fatal=False)


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the word embedding and must keep its copies equal."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        if args.mtp_num_layers:
            ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


if __name__ == "__main__":
    main()
