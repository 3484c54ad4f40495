# SPDX-License-Identifier: Apache-2.0
"""The LLaMA scripts with stock Megatron: nothing of hot switching, on packed and on padded rows."""

import re
from pathlib import Path

import pytest

from tests.examples.command_lines import dry_run, training_arguments, values
from tests.examples.desk import RECORD_ARGUMENTS, Desk, validated
from tests.support.corpus import make, read_corpus
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.ports import free_port

FOLDER = REPOSITORY / "examples/hot_switch/baseline"
BASELINE, A100 = FOLDER / "llama_baseline.sh", FOLDER / "exprs_for_A100_40G.sh"

LOG = """
 iteration        1/       4 | elapsed time per iteration (ms): 900.0 | lm loss: 6.0 |
 iteration        2/       4 | elapsed time per iteration (ms): 500.0 | lm loss: 6.0 |
 iteration        3/       4 | elapsed time per iteration (ms): 100.0 | lm loss: 6.0 |
 iteration        4/       4 | elapsed time per iteration (ms): 300.0 | lm loss: 6.0 |
"""
"""Of stock Megatron, which does not tell tokens."""


def corpus(desk: Desk) -> str:
    """Make a corpus of bytes: documents of 101 and 201 tokens, ends included."""
    for name, length in (("a", 100), ("b", 200)):
        (desk.folder / name).write_text("x" * length)
    make([desk.folder / "a", desk.folder / "b"], desk.folder / "corpus")
    return str(desk.folder / "corpus")


def problems_of(arguments: list[str]) -> str:
    """Return what Megatron's arguments say of the layout, validated in a rank."""
    args = validated(arguments, 8)
    return f"{args.tensor_model_parallel_size} {args.pipeline_model_parallel_size} {args.data_parallel_size}"


def test_stock_megatron_gets_the_strategy_in_its_own_words(desk: Desk) -> None:
    (line,) = dry_run(desk, BASELINE, ["7b", "32768"])
    arguments = training_arguments(line)
    assert not [word for word in arguments if "hot-switch" in word]
    assert (values(arguments, "--seq-length"), "--mock-data" in arguments) == (["32768"], True)
    assert run_ranks(problems_of, 1, arguments) == ["4 2 1"]
    (line,) = dry_run(desk, BASELINE, ["7b", "4096"], ALL_PARALLEL_STRATEGY="2,2,2")
    assert run_ranks(problems_of, 1, training_arguments(line)) == ["2 2 2"]


@pytest.mark.slow
def test_padded_rows_are_made_once_and_their_ends_count_nothing(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    environment = {
        "BACKEND": "cpu",
        "ROWS": "padded",
        "DATA_PATH": corpus(desk),
        "OUTPUT": str(desk.folder),
        "RECORDED_ARGUMENTS": str(recorded),
    }
    code, output = desk.run(BASELINE, ["3b", "4096", "512", "1", "", "4"], **environment)
    assert code == 0 and "3 rows of 128 positions, of which 300 (78.1%) predict a token" in output, output
    # 16 rows of 100 predicted tokens
    assert "tokens of a step: 1600\n" in output
    arguments = recorded.read_text().splitlines()
    rows = desk.folder / "padded/corpus_128"
    assert values(arguments, "--data-path") == [str(rows)]
    assert [len(row) for row in read_corpus(rows)] == [128, 256]
    assert "--eod-mask-loss" in arguments and values(arguments, "--null-tokenizer-eod-id") == ["256"]
    code, output = desk.run(BASELINE, ["3b", "4096", "512", "1", "", "4"], **environment)
    assert code == 0 and "(up to date, nothing done)" in output


def table(output: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of speeds: name, ms per step, ms switching, tokens/s."""
    return re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +(\d+)$", output, re.MULTILINE)


def test_experiments_with_stock_megatron_are_compared_by_the_tokens_of_their_rows(desk: Desk) -> None:
    desk.command("torchrun", f"cat <<'END'\n{LOG}\nEND")
    code, output = desk.run(A100, [], BACKEND="cpu", OUTPUT=str(desk.folder))
    assert code == 0 and "padded" not in output, output
    # Two steps of 16 rows in 0.4 seconds.
    speed = ("200.0", "0.0", str(2 * 16 * 128 * 10 // 4))
    assert table(output) == [(f"{context}_packed", *speed) for context in (4096, 8192, 16384, 32768)]


@pytest.mark.slow
def test_experiments_on_a_corpus_have_padded_rows_too(desk: Desk) -> None:
    desk.command("torchrun", f"cat <<'END'\n{LOG}\nEND")
    code, output = desk.run(A100, ["", corpus(desk)], BACKEND="cpu", OUTPUT=str(desk.folder))
    assert code == 0, output
    assert [row[0] for row in table(output)][:3] == ["4096_packed", "4096_padded", "8192_packed"]
    assert table(output)[1][1:] == ("200.0", "0.0", str(2 * 16 * 100 * 10 // 4))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ROWS": "both"}, "ROWS=both is unknown; use packed or padded"),
        ({"ROWS": "padded"}, "ROWS=padded fills up the documents of a corpus; give DATA_PATH"),
        ({"ALL_PARALLEL_STRATEGY": "1,4,4"}, "1,4,4, which is for 16 GPUs, but there are 8"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(desk: Desk, environment: dict[str, str], message: str) -> None:
    code, output = desk.run(BASELINE, [], BACKEND="cpu", **environment)
    assert code == 1 and message in output and len(output.splitlines()) == 1, output


@pytest.mark.slow
def test_a_toy_trains_with_stock_megatron_on_padded_rows(desk: Desk) -> None:
    environment = {"BACKEND": "cpu", "ROWS": "padded", "MASTER_PORT": str(free_port()), "OUTPUT": str(desk.folder)}
    code, output = desk.run(BASELINE, ["7b", "4096", "512", "1", "", "2"], **environment, DATA_PATH=corpus(desk))
    assert code == 0, output[-6000:]
    (last,) = re.findall(r"iteration +2/ +2 .*", output)
    assert "lm loss: " in last and "switching" not in output
    assert (Path(environment["OUTPUT"]) / "padded/corpus_128.idx").exists()
