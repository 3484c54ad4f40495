# SPDX-License-Identifier: Apache-2.0
"""Data that would make Megatron hang are refused."""

from tests.support.corpus import make
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain


def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("All work and no play makes a dull corpus.\n" * 20)
    prepared = make(folder, tmp_path / "corpus")
    return [*toy_gpt(mock_data=None, tokenizer_type=None, vocab_size=None), *prepared.megatron_args()]


def test_a_part_of_the_split_without_documents_is_refused_by_name(tmp_path):
    run = [*corpus(tmp_path), "--split", "969,30,1", "--eval-iters", "1", "--eval-interval", "2"]
    (rank,) = run_failing_pretrain(run, 1, timeout=90)
    assert rank.exit_code != 0
    assert "--split 969,30,1" in rank.stderr
    assert "has no document for its valid part" in rank.stderr
    assert "Traceback" not in rank.stderr


def test_an_empty_part_that_nobody_asks_for_is_not_a_mistake(tmp_path):
    run_pretrain([*corpus(tmp_path), "--split", "1,0,0"], 1)
