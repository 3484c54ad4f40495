# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a tokenizer, and a task of its own."""

import json
from pathlib import Path

import yaml

from tests.convert import models

WORDS = ["<unk>", "<eos>", *(f"w{number}" for number in range(248))]


def with_tokenizer(folder: Path, name: str = "llama") -> Path:
    """Save a model of 250 words, and the tokenizer that knows them."""
    models.save(name, folder)
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(kinds.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    return folder


def local_task(folder: Path, questions: list[dict[str, object]]) -> Path:
    """Write a task of multiple choice, `local_choice`, and its data."""
    folder.mkdir(parents=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "local_choice.yaml").write_text(
        yaml.safe_dump(
            {
                "task": "local_choice",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1.0},
            }
        )
    )
    return folder
