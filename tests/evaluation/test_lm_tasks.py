# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness on a local model with local questions."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.evaluation.lm_tasks import Task, _measures, check_tasks, parse_tasks
from tests.convert import models
from tests.evaluation.models import WORDS, local_task, with_tokenizer
from tests.support.distributed import REPOSITORY
from tests.support.harness import harness_path


def test_a_list_of_tasks_says_how_many_examples_each_has():
    assert parse_tasks(" sciq:0, arc_challenge:25,mmlu,") == [
        Task(name="sciq", shots=0),
        Task(name="arc_challenge", shots=25),
        Task(name="mmlu"),
    ]


@pytest.mark.parametrize(
    ("text", "said"), [("sciq:x", "--tasks sciq:x"), (":3", "--tasks :3"), (" ,", "no task is named")]
)
def test_a_bad_list_is_refused(text: str, said: str):
    with pytest.raises(UserError, match=said):
        parse_tasks(text)


def test_a_missing_harness_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="--tasks needs lm-evaluation-harness") as refused:
        check_tasks(parse_tasks("sciq"))
    # All packages of the extra, as docs/install.md lists them: a second message for the next one would be one too many.
    lines = (REPOSITORY / "docs/install.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| `eval` |")]
    packages = row.split("|")[2].strip().split(", ")
    assert len(packages) == 4
    assert all(f"'{package}" in str(refused.value).partition("pip install")[2] for package in packages)


def test_a_measure_is_finite_and_an_error_that_cannot_be_estimated_left_out():
    whole = {"acc,none": 0.5, "acc_stderr,none": math.nan, "alias": "x", "sample_len": 1}
    assert _measures("sciq", whole) == {"acc": 0.5}
    with pytest.raises(UserError, match="--tasks sciq: acc is nan"):
        _measures("sciq", {"acc,none": math.nan})


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_script_evaluates_a_model_on_local_questions(tmp_path: Path):
    random.seed(5)
    questions: list[dict[str, object]] = [
        {"question": " ".join(random.choices(WORDS[2:], k=6)), "choices": random.sample(WORDS[2:], 2), "answer": 0}
        for _ in range(16)
    ]
    model = with_tokenizer(tmp_path / "model")
    tasks = local_task(tmp_path / "tasks", questions)
    base = {"name": "dense", "model": "dense", "perplexity": {}, "tasks": {"local_choice": {"acc": 0.25}}}
    (tmp_path / "dense.json").write_text(json.dumps(base))
    environment = {
        **os.environ,
        "PATH": f"{harness_path()}{os.pathsep}{os.environ['PATH']}",
        "TASKS": "local_choice:0",
        "TASK_FILES": str(tasks),
        "RESULTS": str(tmp_path / "results"),
        "BASELINES": str(tmp_path / "dense.json"),
        "HF_HUB_OFFLINE": "1",
    }
    script = [str(REPOSITORY / "examples/spes/eval_full.sh"), str(model), "mixture"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "mixture.json").read_text())
    task = results["tasks"]["local_choice"]
    assert (task["acc"], task["shots"], task["questions"]) == (right(questions), 0, 16)
    assert 0.25 < right(questions) < 0.75
    assert done.stdout.splitlines()[-1].split() == ["local_choice", "(acc)", "0.2500", f"{right(questions):.4f}"]
    assert (tmp_path / "results" / "mixture.png").read_bytes().startswith(b"\x89PNG")
    environment["TASKS"] = "no_such_task"
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "lm-evaluation-harness knows no task no_such_task, nor is it in" in done.stderr


def right(questions: list[dict[str, object]]) -> float:
    """Return for which part of the questions the model finds the answer the likeliest choice."""
    model, found = models.make("llama"), 0
    for question in questions:
        row = torch.tensor([[WORDS.index(word) for word in str(question["question"]).split()]])
        with torch.no_grad():
            logits = model(row).logits[0, -1]
        first, second = (float(logits[WORDS.index(word)]) for word in question["choices"])
        found += first > second
    return found / len(questions)
