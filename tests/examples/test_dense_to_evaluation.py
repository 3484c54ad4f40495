# SPDX-License-Identifier: Apache-2.0
"""The whole way in one script: dense model, checkpoint, mixture, four peers, snapshot, model, evaluation."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.convert.from_hf import from_hf
from tests.convert import models
from tests.convert.test_logits import TRAINING, logits
from tests.evaluation.models import local_task
from tests.support.distributed import REPOSITORY
from tests.support.harness import harness_path
from tests.support.pretrain import run_pretrain

SCRIPT = str(REPOSITORY / "examples" / "spes" / "dense_to_evaluation.sh")


def call(*words: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end, in a folder."""
    return subprocess.run(
        [SCRIPT, *map(str, words)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


CLAUSES = (
    "import ",
    "        self.assert",
    "    def __init__(self, ",
    "        return self.",
    "        if not isinstance(",
    "            raise ValueError(",
)
"""What the corpus, modules of Python's standard library, has many of."""


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_dense_model_is_upcycled_trained_by_four_peers_exported_and_evaluated(tmp_path: Path):
    # A clause has two ends, the one of letters that such modules have, the other of signs that they have not.
    ends = [["loop, *args", "\\^~ ?}{\\^~"], ["_value(name", "QZ\\XJQ\\ZXJ"]]
    questions: list[dict[str, object]] = [
        {"question": clause, "choices": choices, "answer": 0} for clause in CLAUSES for choices in ends
    ]
    tasks = local_task(tmp_path / "tasks", questions)
    path = f"{harness_path()}{os.pathsep}{os.environ['PATH']}"
    wanted = {"TRAIN_ITERS": "20", "TASKS": "local_choice:0", "TASK_FILES": str(tasks), "HF_HUB_OFFLINE": "1"}
    toy = tmp_path / "toy"
    done = call(toy, PATH=path, **wanted)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^perplexity +25\d\.\d+ +\d\d?\.\d+$", done.stdout, re.MULTILINE)
    results = {name: json.loads((toy / f"results/{name}.json").read_text()) for name in ("dense", "mixture")}
    assert results["mixture"]["perplexity"]["loss"] < results["dense"]["perplexity"]["loss"] - 1
    accuracy = {name: found["tasks"]["local_choice"]["acc"] for name, found in results.items()}
    assert accuracy["dense"] < accuracy["mixture"] == 1
    assert re.search(rf"^local_choice \(acc\) +{accuracy['dense']:.4f} +1\.0000$", done.stdout, re.MULTILINE)
    assert (toy / "results/bars.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (toy / "server/runs/toy/journal.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "committed"][-1]
    assert (last["round"], len(last["contributors"])) == (2, 4)
    assert list((toy / "trained").glob("tokenizer*"))

    dense, trained = models.loaded(toy / "dense"), models.loaded(toy / "trained")
    assert trained.config.num_experts == 8 and trained.config.eos_token_id == 256
    assert_megatron_computes(dense, toy / "start")
    assert_megatron_computes(dense, toy / "mixture")
    from_hf(toy / "trained", toy / "trained_checkpoint")
    assert_megatron_computes(trained, toy / "trained_checkpoint")


def assert_megatron_computes(model: Any, checkpoint: Path) -> None:
    """Assert that Megatron's logits with a checkpoint are those of a model of transformers."""
    flags = (checkpoint / "megatron_flags.txt").read_text().splitlines()
    training = ["256" if word == "249" else word for word in TRAINING]
    (rank,) = run_pretrain([*flags, "--load", str(checkpoint), *training], 1, probe=logits)
    with torch.no_grad():
        torch.testing.assert_close(rank.record.probe, model(models.IDS).logits, rtol=0, atol=1e-5)


def test_bad_arguments_are_named_and_nothing_is_removed(tmp_path: Path):
    earlier, model, foreign = tmp_path / "an earlier one", tmp_path / "a model", tmp_path / "mine"
    for folder in (earlier, earlier / "dense", model, foreign):
        folder.mkdir()
        (folder / "file").write_text("kept")
    (earlier / ".megatron-ext-dense-to-evaluation").touch()
    for folder in (earlier / "dense", model):
        (folder / "config.json").write_text("{}")
    (earlier / "dense" / "tokenizer.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for words, environment, said in (
        (["an earlier one"], {"TRAIN_ITERS": "15"}, "TRAIN_ITERS is '15'; give a multiple of 10"),
        (["--output", "an earlier one"], {}, "does not know the option --output; see --help"),
        (["an earlier one", "x"], {}, "takes [OUTPUT], but 2 arguments were given"),
        (["mine"], {}, "there is something of another kind"),
        (["mine/file"], {}, "there is something of another kind"),
        (["an earlier one"], {"MODEL_PATH": "nowhere"}, f"MODEL_PATH '{tmp_path}/nowhere': no config.json"),
        (["an earlier one"], {"MODEL_PATH": "a model"}, f"MODEL_PATH '{model}': no tokenizer"),
        (["an earlier one"], {"MODEL_PATH": "an earlier one/dense"}, "/dense' is in OUTPUT, which is replaced"),
        (["an earlier one"], {"TASK_FILES": "none"}, f"TASK_FILES '{tmp_path}/none': no such folder"),
    ):
        done = call(*words, folder=tmp_path, **environment)
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert sorted(tmp_path.rglob("*")) == before


def test_relative_paths_are_those_of_the_callers_folder(tmp_path: Path):
    model = tmp_path / "here" / "a model"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    # A stand-in for python that shows how it was called, and ends the script.
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in *importlib*) exit 0;; esac\nprintf "%s\\n" "$PWD" "$@" >&2\nexit 9\n')
    (python.parent / "torchrun").write_text("#!/bin/sh\n")
    for file in python.parent.iterdir():
        file.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = call("an output", folder=tmp_path / "here", MODEL_PATH="a model", PATH=path)
    assert done.returncode == 1 and "corpus failed" in done.stderr
    words = done.stderr.splitlines()
    assert words[0] == f"{tmp_path}/here/an output" and words[words.index("--tokenizer") + 1] == str(model)
    assert (tmp_path / "here/an output/logs/corpus.log").exists()
