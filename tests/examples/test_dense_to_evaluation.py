# SPDX-License-Identifier: Apache-2.0
"""The whole way in one script: dense model, checkpoint, mixture, four peers, snapshot, model, evaluation."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.convert import models
from tests.support.distributed import REPOSITORY

SCRIPT = str(REPOSITORY / "examples" / "spes" / "dense_to_evaluation.sh")


def call(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    return subprocess.run(
        [SCRIPT, *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_dense_model_is_upcycled_trained_by_four_peers_exported_and_evaluated(tmp_path: Path):
    done = call(tmp_path / "toy", TRAIN_ITERS="20")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^perplexity +25\d\.\d+ +\d\d?\.\d+$", done.stdout, re.MULTILINE)
    results = {name: json.loads((tmp_path / f"toy/results/{name}.json").read_text()) for name in ("dense", "mixture")}
    assert results["mixture"]["perplexity"]["loss"] < results["dense"]["perplexity"]["loss"] - 1
    assert (tmp_path / "toy/results/bars.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (tmp_path / "toy/server/runs/toy/journal.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "committed"][-1]
    assert (last["round"], len(last["contributors"])) == (2, 4)
    trained = models.loaded(tmp_path / "toy" / "trained")
    with torch.no_grad():
        assert trained(torch.arange(20)[None]).logits.isfinite().all()
    assert list((tmp_path / "toy" / "trained").glob("tokenizer*"))
    assert trained.config.num_experts == 8 and trained.config.eos_token_id == 256


def test_bad_arguments_are_named_and_nothing_is_removed(tmp_path: Path):
    done = call(tmp_path, TRAIN_ITERS="15")
    assert done.returncode != 0 and "TRAIN_ITERS is '15'; give a multiple of 10" in done.stderr
    (tmp_path / "file").write_text("mine")
    done = call(tmp_path)
    assert done.returncode != 0 and "there is something of another kind" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"
