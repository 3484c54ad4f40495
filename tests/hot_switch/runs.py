# SPDX-License-Identifier: Apache-2.0
"""Runs that the tests of training with hot switching share, and stock Megatron on the same documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.presets import Options, toy_gpt
from tests.support.pretrain import RankOutcome, run_pretrain

__all__ = [
    "COMMON",
    "EXPERTS_APART",
    "GUESTS_OF_PARTS",
    "LLAMA",
    "PARTS_OF_ROWS",
    "arguments",
    "assert_equal_except_for_rounding",
    "assert_resumed",
    "forbid_attention_by_document",
    "full_parameters",
    "hot_run",
    "losses",
    "many_rounds",
    "one_document_per_row",
    "same_weights",
    "says",
    "stock_run",
    "tell_padding",
]

COMMON: Options = {
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "train_iters": 20,
    "lr": 1e-3,
    "calculate_per_token_loss": True,
    "vocab_size": 127,
    "make_vocab_size_divisible_by": 8,
}

LLAMA = {
    "swiglu": True,
    "no_bias_swiglu_fusion": True,
    "no_rope_fusion": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}

PARTS_OF_ROWS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 1, pp: 2, cp: 2}
  - {dp: 4, tp: 1, pp: 1}
  - {dp: 1, tp: 2, pp: 1, cp: 2, sequence_parallel: true, recompute: full}
"""

GUESTS_OF_PARTS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 2, tp: 1, pp: 2}
  - {dp: 1, tp: 1, pp: 1, cp: 4, recompute: selective}
  - {dp: 1, tp: 1, pp: 2, vpp: 2, cp: 2, micro_batch_size: 2}
"""

EXPERTS_APART = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 4, tp: 1, pp: 1, ep: 2}
  - {dp: 2, tp: 1, pp: 2, ep: 1}
  - {dp: 2, tp: 2, pp: 1, ep: 4, etp: 1, sequence_parallel: true}
"""
"""Experts on other ranks for each strategy."""


def arguments(strategies: Sequence[str], buckets: Sequence[int], **overrides: Any) -> list[str]:
    """Return the command line of a toy GPT with hot switching."""
    return toy_gpt(
        COMMON,
        {"hot_switch_strategies": list(strategies), "hot_switch_bucket_sizes": list(buckets)},
        **overrides,
    )


def hot_run(strategies: Sequence[str], buckets: Sequence[int], **overrides: Any) -> list[RankOutcome]:
    """Train with hot switching, on as many ranks as the strategies say."""
    return run_pretrain(arguments(strategies, buckets, **overrides), _world_size(strategies[0]), probe=full_parameters)


def stock_run(home: str, *before: Callable[[], None], **overrides: Any) -> list[RankOutcome]:
    """Let stock Megatron, with home's layout, train the same documents, each in a row of its own.

    Args:
        home: the layout.
        before: called on every rank before.
        overrides: options.
    """
    _, tp, pp = map(int, home.split(","))
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    return run_pretrain(
        toy_gpt(COMMON, layout, **overrides),
        _world_size(home),
        patch="backend-only",
        probe=full_parameters,
        before=(feed_documents, *before),
    )


def _world_size(strategy: str) -> int:
    dp, tp, pp = map(int, strategy.split(","))
    return dp * tp * pp


def losses(ranks: list[RankOutcome]) -> list[float]:
    """Return the loss of every iteration."""
    return ranks[-1].losses


def assert_equal_except_for_rounding(ours: list[RankOutcome], theirs: list[RankOutcome]) -> None:
    """Compare two runs in fp32: losses, gradient norms (which tell what clipping and Adam hide) and parameters."""
    assert len(losses(ours)) == len(losses(theirs)) > 0
    assert losses(ours) == pytest.approx(losses(theirs), rel=0, abs=1e-5)
    assert ours[0].grad_norms == pytest.approx(theirs[0].grad_norms, rel=1e-4)
    mine, others = ours[0].probe, theirs[0].probe
    assert mine.keys() == others.keys()
    apart = max((float(np.abs(mine[name] - others[name]).max()), name) for name in mine)
    assert apart[0] <= 1e-4, apart


def assert_resumed(resumed: list[RankOutcome], through: list[RankOutcome], *, after: int) -> None:
    """Compare the bits of a run from a checkpoint with those of the run that saved it, from an iteration on."""
    for rank, whole in zip(resumed, through, strict=True):
        assert rank.losses == whole.losses[after:]
        assert rank.grad_norms == whole.grad_norms[after:]
        assert rank.parameters == whole.parameters
        assert rank.optimizer == whole.optimizer


def feed_documents() -> None:
    """Give Megatron's loop the documents of --mock-data in place of its own samples."""
    from megatron.training import training

    training.build_train_valid_test_data_iterators = lambda provider: (_document_rows(), None, None)


def tell_padding() -> None:
    """Let stock Megatron's routers know where its rows have padding, as its GPTModel offers.

    Without our repair it fails where it keeps padding from the counts that move experts' biases.
    """
    import functools

    from megatron.core.models.gpt import GPTModel

    from megatron_ext.patching import PatchRegistry
    from megatron_ext.seams.router import padding_patches

    PatchRegistry().apply([patch for patch in padding_patches() if patch.name == "router/bias-counts"])
    forward = GPTModel.forward

    @functools.wraps(forward)
    def told(self: Any, *args: Any, loss_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, loss_mask=loss_mask, padding_mask=loss_mask == 0, **kwargs)

    GPTModel.forward = told


def forbid_attention_by_document() -> None:
    """Let the attention of one document after the other fail, so that what is left is another one."""
    from megatron_ext.hot_switch.runtime import document_attention as attention

    attention.attend_within_documents = None


def many_rounds() -> None:
    """Let switches have many small rounds, so that layers are used long before the last one has arrived."""
    from megatron_ext.hot_switch.transfer import messages

    sizes = messages.MessageSizes(direct_bytes=2048, chunk_bytes=4096, round_bytes=8192)
    messages.DEFAULT_SIZES.update(gloo=sizes, nccl=sizes)


def same_weights() -> None:
    """Let a model begin with the same weights whatever the context parallel size is.

    Megatron draws some of them after a warm-up of its kernels with random numbers, whose count depends on the size.
    """
    from megatron.training import initialize

    initialize._warmup_jit_function = lambda tp_size=None: None


def one_document_per_row() -> None:
    """Let no two documents of --mock-data fit into a row of the buckets 32, 16, 8, 0."""
    from megatron_ext.hot_switch.data.training_documents import MockDocuments

    make = MockDocuments.__init__

    def made(self: Any, *, longest: int, vocab_size: int, seed: int) -> None:
        make(self, longest=longest, vocab_size=vocab_size, seed=seed)
        self._lengths = np.clip(self._lengths, 6, longest + 1)

    MockDocuments.__init__ = made


def _document_rows() -> Any:
    from megatron.core import mpu
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args

    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    return RerunDataIterator(_rows(args.seq_length, args.seed, args.consumed_train_samples + replica, replicas))


def _rows(length: int, seed: int, first: int, step: int) -> Iterator[dict[str, Any]]:
    import torch

    from megatron_ext.hot_switch.data.sequences import SequenceOrder
    from megatron_ext.hot_switch.data.training_documents import MockDocuments

    documents = MockDocuments(longest=length, vocab_size=127, seed=seed)
    order = SequenceOrder(documents.lengths, longest=length, seed=seed)
    place = first
    while True:
        sequence = order.at(place)
        tokens = torch.from_numpy(documents.read(sequence.document, sequence.offset, sequence.positions + 1).copy())
        padding = torch.zeros(length - sequence.positions, dtype=torch.int64)
        yield {
            "tokens": torch.cat([tokens[:-1], padding])[None],
            "labels": torch.cat([tokens[1:], padding])[None],
            "loss_mask": torch.cat([torch.ones(sequence.positions), padding.float()])[None],
            "position_ids": torch.arange(length)[None],
            "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
        }
        place += step


def full_parameters(model: Any, optimizer: Any, args: Any) -> dict[str, Any]:
    """Return on a worker's first rank its parameters, and biases of routers, each as a whole, as numpy arrays; copies
    must be equal bits.
    """
    import torch.distributed as dist

    from megatron_ext.params import ParameterView, gather
    from megatron_ext.seams.process_groups import current_groups

    # Stock Megatron does not know the option.
    group = current_groups().inside if getattr(args, "use_local_sgd", False) else dist.group.WORLD
    view = ParameterView.from_model(model)
    mine = {entry.placed.name: entry.parameter.detach().float().cpu() for entry in (*view.entries, *view.buffers)}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if dist.get_rank(group) > 0:
        return {}
    held = [
        ([placed for placed in view.placement.on_rank(rank) if placed.name in tensors], tensors)
        for rank, tensors in enumerate(everyone)
    ]
    return {name: value.numpy() for name, value in gather(view.placement.tensors, held).items()}


def says(ranks: list[RankOutcome], text: str) -> bool:
    """Return whether the run's first rank printed a text."""
    return text in ranks[0].stdout
