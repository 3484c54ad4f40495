# SPDX-License-Identifier: Apache-2.0
"""Conversations of --sft as documents: what Megatron's own dataset makes of them, each by itself.

Megatron packs the conversations of a line into a sample of --seq-length, cuts off what is longer and fills up what is
shorter. Here the sample is taken apart again at the bounds that it gives, so that conversations go to strategies by
their own lengths. Which tokens count in the loss is what its mask says.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ext.data.split import parts_of
from megatron_ext.errors import UserError
from megatron_ext.hot_switch.data.document_source import Counted, Documents, Tokens, require_rows
from megatron_ext.hot_switch.model_config import attention_of

__all__ = ["Conversations", "conversation_problems", "dataset_config"]


class Conversations(Documents):
    """The training part of a file of conversations, tokenized when it is opened.

    A document ends with the last token that counts: nothing that follows has a gradient. One without any, such as a
    conversation whose answer was cut off, has a single token, with which there is nothing to predict.
    """

    def __init__(self, path: str, split: str, config: Any, rows: int | None = None, *, option: str) -> None:
        """Tokenize the conversations.

        Args:
            path: of the JSON lines.
            split: Megatron's --split, of lines; the first part is for training.
            config: the `GPTDatasetConfig` of `dataset_config`.
            rows: of the vocabulary, below which tokens must be; None for any.
            option: what the user gives the file by, for messages.

        Raises:
            UserError: no line is for training, or a token is none of the vocabulary.
        """
        from megatron.core.datasets.utils import Split
        from megatron.training.datasets.sft_dataset import SFTDataset

        lines = SFTDataset.build_low_level_dataset(path, config)
        count = SFTDataset.numel_low_level_dataset(lines)
        begin, end = parts_of(count, split)[0] or (0, 0)
        if begin == end:
            raise UserError(f"--split {split}: {path} has no line for training; give the first part more")
        samples = SFTDataset(lines, path, np.arange(begin, end), end - begin, Split.train, config)
        found = [conversation for line in range(len(samples)) for conversation in _apart(samples[line])]
        self._lengths = np.array([len(tokens) for tokens, _ in found], dtype=np.int64)
        self._firsts = np.cumsum(self._lengths) - self._lengths
        self._tokens = np.concatenate([tokens for tokens, _ in found])
        self._counted = np.concatenate([counted for _, counted in found])
        require_rows(self._tokens, rows, f"{option} {path}: a conversation")

    @property
    def lengths(self) -> Tokens:
        """Tokens of each conversation up to the last one that counts."""
        return self._lengths

    def read(self, document: int, offset: int, count: int) -> Tokens:
        """Return `count` tokens of a conversation, from token `offset` on."""
        first = int(self._firsts[document]) + offset
        return self._tokens[first : first + count]

    def counted(self, document: int, offset: int, count: int) -> Counted:
        """Return which of these tokens count in the loss where they are predicted."""
        first = int(self._firsts[document]) + offset
        return self._counted[first : first + count]


def _apart(sample: dict[str, Any]) -> list[tuple[npt.NDArray[np.int32], Counted]]:
    """Take a sample of Megatron's apart.

    Returns:
        For each conversation its tokens, the last of which is only predicted, and which of them count.
    """
    tokens, labels, mask = (sample[name].numpy() for name in ("tokens", "labels", "loss_mask"))
    bounds = sample["cu_seqlens"].tolist()
    found = []
    for first, end in pairwise(bounds):
        if first == end:
            continue  # the list of bounds is filled up with its last one
        places = np.flatnonzero(mask[first:end])
        after = first + (int(places[-1]) + 1 if len(places) else 0)
        # A label, not the token that follows: of the last position it may be the first token of the next conversation.
        last = labels[after - 1 : after] if len(places) else tokens[first : first + 1]
        counted = np.concatenate([[False], mask[first:after] > 0])
        found.append((np.concatenate([tokens[first:after], last]).astype(np.int32), counted))
    return found


def dataset_config(args: Any) -> Any:
    """Return the `GPTDatasetConfig` with which Megatron makes samples of conversations.

    Without context parallelism, for whose sake Megatron would fill up every conversation: here rows are filled up.

    Args:
        args: Megatron's arguments.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    return GPTDatasetConfig(
        tokenizer=build_tokenizer(args),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )


def conversation_problems(args: Any, paths: tuple[str, ...], option: str) -> list[str]:
    """Return why conversations could not be read, one sentence each.

    Args:
        args: Megatron's arguments as parsed.
        paths: of the files.
        option: what the user gives them by.
    """
    problems = [
        f"{option} {path}: there is no such file; give a file of JSON lines with \"messages\", as --sft reads"
        for path in paths
        if not os.path.isfile(path)
    ]
    if args.tokenizer_type != "SFTTokenizer":
        problems.append(
            f"--sft needs a tokenizer of conversations, and --tokenizer-type is {args.tokenizer_type}; use SFTTokenizer"
        )
    if importlib.util.find_spec("datasets") is None:
        problems.append("--sft: Megatron reads conversations with the package datasets; pip install datasets")
    return problems + _evaluation_problems(args)


def _evaluation_problems(args: Any) -> list[str]:
    """Return why conversations could not be evaluated, which is done on Megatron's packed samples, a row each."""
    if not args.eval_iters:
        return []
    problems, ways_out = [], "or --eval-iters 0"
    if args.micro_batch_size > 1:
        problems.append(
            f"--sft: evaluation takes samples of conversations one by one, and --micro-batch-size is "
            f"{args.micro_batch_size}; give 1, and rows per micro-batch in the strategy file, {ways_out}"
        )
    if args.transformer_impl == "local" and args.context_parallel_size > 1:
        problems.append(
            f"--sft: evaluation has packed samples, which attention over parts of rows does not take; drop "
            f"--context-parallel-size, {ways_out}"
        )
    if args.transformer_impl == "local" and attention_of(args) == "rows":
        problems.append(
            f"--sft: evaluation has packed samples, which Megatron's unfused attention does not take; use "
            f"--hot-switch-attention documents, {ways_out}"
        )
    return problems
