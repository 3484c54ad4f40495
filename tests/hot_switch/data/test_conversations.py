# SPDX-License-Identifier: Apache-2.0
"""Conversations for --sft: taken from Megatron's own samples, trained by length, prompts outside the loss."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.hot_switch.runs import COMMON, arguments, assert_equal_except_for_rounding, assert_resumed, full_parameters
from tests.support.corpus import make_tokenizer
from tests.support.distributed import run_ranks
from tests.support.harness import harness_path
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain

LONGEST = 64


def conversation(number, words):
    turns = [{"role": "system", "content": "be brief"}]
    for turn in range(1 + number % 2):
        turns.append({"role": "user", "content": f"hello {number} " + "world " * (1 + (number + turn) % 3)})
        turns.append({"role": "assistant", "content": "return " * words})
    return turns


LINES = [conversation(number, 1 + number * 7 % 10) for number in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with conversations, one a line, and a tokenizer that knows the words of Megatron's prompts."""
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in LINES))
    texts = [message["content"] for line in LINES for message in line] * 3
    special = {"unk_token": "<unk>", "additional_special_tokens": ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]}
    make_tokenizer(folder / "tokenizer", vocab_size=320, texts=texts, **special)
    return folder


@pytest.fixture(scope="module")
def with_datasets(tmp_path_factory):
    """What lets a process find the package datasets, which Megatron reads conversations with."""
    (packages,) = Path(harness_path()).parent.glob("lib/python*/site-packages")
    return partial(find_datasets, str(packages), str(tmp_path_factory.mktemp("datasets")))


def find_datasets(packages, cache):
    if packages not in sys.path:
        sys.path.append(packages)  # behind what the tests run with
    os.environ["HF_DATASETS_CACHE"] = cache


def of_conversations(folder, **more):
    return {
        "mock_data": False,
        "vocab_size": None,
        "seq_length": LONGEST,
        "max_position_embeddings": LONGEST,
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": os.fspath(folder / "tokenizer"),
        "sft_tokenizer_prompt_format": "nemotron-nano-v2",
        "no_create_attention_mask_in_dataloader": True,
        "train_iters": 6,
        **more,
    }


def the_data(folder, **more):
    return {"sft": True, "data_path": [os.fspath(folder / "lines.jsonl")], "split": "90,10,0", **more}


def megatrons_samples(folder, find, path, split_at):
    """Return Megatron's samples of the first lines, as it makes them."""
    find()
    from megatron.training.datasets.sft_dataset import SFTDataset

    from megatron_ext.hot_switch.data.conversations import dataset_config

    args = SimpleNamespace(**{**TOKENIZER, **of_conversations(folder)}, seed=1, allow_ambiguous_pad_tokens=False)
    config = dataset_config(args)
    lines = SFTDataset.build_low_level_dataset(os.fspath(path), config)
    from megatron.core.datasets.utils import Split

    samples = SFTDataset(lines, None, np.arange(split_at), split_at, Split.train, config)
    return config, [{name: value.numpy() for name, value in samples[line].items()} for line in range(split_at)]


TOKENIZER = {
    "rank": 0,
    "make_vocab_size_divisible_by": 1,
    "tensor_model_parallel_size": 1,
    "metadata_path": None,
    "tokenizer_metadata": None,
    "padded_vocab_size": None,
    "pad_vocab_size": False,
    "special_tokens": None,
}


def read_apart(folder, find, path):
    """Return (tokens, counted) of every conversation that is read, and Megatron's samples of the same lines."""
    config, samples = megatrons_samples(folder, find, path, 3)
    from megatron_ext.hot_switch.data.conversations import Conversations

    read = Conversations(os.fspath(path), "75,25,0", config, option="--data-path")
    found = [
        (read.read(number, 0, length).tolist(), read.counted(number, 1, length - 1).tolist())
        for number, length in enumerate(map(int, read.lengths))
    ]
    return found, samples


def test_a_sample_of_several_conversations_is_taken_apart_and_what_counts_is_what_counts_there(
    tmp_path, folder, with_datasets
):
    path = tmp_path / "packed.jsonl"
    lines = [LINES[0] + LINES[4], LINES[1], LINES[2] + LINES[3], LINES[5]]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    ((found, samples),) = run_ranks(read_apart, 1, folder, with_datasets, path)
    assert len(found) == 5
    trained = [(tokens[place], tokens[place + 1]) for tokens, mask in found for place in np.flatnonzero(mask)]
    assert trained == [pair for sample in samples for pair in counted_predictions(sample)]
    *whole, cut_off_in_the_prompt = [mask for _, mask in found]
    assert all(0 < sum(mask) < len(mask) and mask[-1] for mask in whole)
    assert cut_off_in_the_prompt == []


def counted_predictions(sample):
    return [
        (int(sample["tokens"][place]), int(sample["labels"][place])) for place in np.flatnonzero(sample["loss_mask"])
    ]


def feed_samples(folder, find):
    """Give stock Megatron's loop the samples of its own dataset, a line to a row, in hot switching's order."""
    from megatron.training import training

    find()
    training.build_train_valid_test_data_iterators = lambda provider: (rows(folder, find), None, None)


def rows(folder, find):
    from megatron.core import mpu
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args

    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    return RerunDataIterator(
        endless_rows(folder, find, args, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    )


def endless_rows(folder, find, args, place, replicas):
    import torch

    from megatron_ext.hot_switch.data.sequences import SequenceOrder

    _, samples = megatrons_samples(folder, find, folder / "lines.jsonl", 54)
    lengths = [2 + np.flatnonzero(sample["loss_mask"])[-1] for sample in samples]
    order = SequenceOrder(np.array(lengths), longest=LONGEST, seed=args.seed)
    mask = torch.ones(1, 1, LONGEST, LONGEST, dtype=torch.bool).triu(1)
    while True:
        sample = samples[order.at(place).document]
        row = {name: torch.from_numpy(sample[name])[None] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        row["labels"] = row["labels"].clamp(min=0)  # what is not counted
        yield {**row, "attention_mask": mask}
        place += replicas


def test_hot_equals_static_on_conversations(tmp_path, folder, with_datasets):
    """Also: an evaluation on Megatron's packed samples, and a resume."""
    file = tmp_path / "strategies.yaml"
    file.write_text(
        "bucket_sizes: [64, 52, 0]\nstrategies: [{dp: 2, tp: 1, pp: 1, micro_batch_size: 1}, {dp: 1, tp: 2, pp: 1}]\n"
    )
    shared = of_conversations(folder)
    switching = {**the_data(folder), "hot_switch_strategy_file": os.fspath(file), "eval_iters": 1, "eval_interval": 3}
    saved = os.fspath(tmp_path / "saved")

    def hot(**where):
        command = toy_gpt(COMMON, shared, switching, **where)
        return run_pretrain(command, 2, probe=full_parameters, before=with_datasets)

    through = hot(save=saved, save_interval=3)
    assert "switching (ms): 0.0 |" not in through[-1].stdout  # the guest trains in every step
    stock = run_pretrain(
        toy_gpt(COMMON, shared, mock_data=True),
        2,
        patch="backend-only",
        probe=full_parameters,
        before=partial(feed_samples, folder, with_datasets),
    )
    assert_equal_except_for_rounding(through, stock)
    assert "validation loss at iteration 3" in through[-1].stdout
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("3")
    assert_resumed(hot(load=saved), through, after=3)


@pytest.mark.slow
def test_workers_of_local_sgd_switch_on_conversations_and_resume_in_mid_interval(tmp_path, folder, with_datasets):
    file = tmp_path / "strategies.yaml"
    file.write_text("bucket_sizes: [64, 52, 0]\nstrategies: [{dp: 2, tp: 1, pp: 1}, {dp: 1, tp: 2, pp: 1}]\n")
    workers = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 2, "global_batch_size": 16}
    switching = {**the_data(folder), **workers, "hot_switch_strategy_file": os.fspath(file), "eval_iters": 1}
    shared = of_conversations(folder)

    def run(**where):
        command = toy_gpt(COMMON, shared, switching, eval_interval=2, **where)
        return run_pretrain(command, 4, probe=full_parameters, before=with_datasets)

    through = run(save=os.fspath(tmp_path / "saved"), save_interval=3)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("3")
    assert_resumed(run(load=os.fspath(tmp_path / "saved")), through, after=3)
    assert all(rank.parameters == through[0].parameters for rank in through)  # they end at a round


def test_what_conversations_cannot_be_read_with_is_said(folder):
    data = the_data(folder, data_path=["nowhere.jsonl"])
    command = arguments(["1,1,1"], [LONGEST, 0], **of_conversations(folder, **data, tokenizer_type="NullTokenizer"))
    (exit_of_rank,) = run_failing_pretrain(command, 1)
    assert "--data-path nowhere.jsonl: there is no such file" in exit_of_rank.stderr
    assert "--tokenizer-type is NullTokenizer; use SFTTokenizer" in exit_of_rank.stderr
    assert "Traceback" not in exit_of_rank.stderr


@pytest.mark.parametrize(
    ("strategies", "options", "said"),
    [
        (["1,1,1"], {"micro_batch_size": 2}, "--sft: evaluation takes samples of conversations one by one"),
        (["1,1,1,2"], {"context_parallel_size": 2}, "which attention over parts of rows does not take"),
        (["1,1,1"], {"hot_switch_attention": "rows"}, "which Megatron's unfused attention does not take; use"),
    ],
    ids=["micro-batches", "context parallelism", "rows"],
)
def test_conversations_that_could_not_be_evaluated_are_refused_before_training(
    folder, with_datasets, strategies, options, said
):
    data = the_data(folder, eval_iters=1)
    command = arguments(strategies, [LONGEST, 0], **of_conversations(folder, **data, **options))
    for rank in run_failing_pretrain(command, int(options.get("context_parallel_size", 1)), before=with_datasets):
        assert said in rank.stderr and "or --eval-iters 0" in rank.stderr
        assert "Traceback" not in rank.stderr
