# SPDX-License-Identifier: Apache-2.0
"""The scripts that make a Hugging Face model of a run and evaluate it: what they call, and what they refuse."""

import os
import subprocess
from pathlib import Path

import pytest

from megatron_ext.convert.from_hf import from_hf
from tests.convert import models
from tests.support.distributed import REPOSITORY

SCRIPTS = REPOSITORY / "examples" / "spes"


def call(script: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        [str(SCRIPTS / script), *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_run_becomes_a_model_under_both_spellings(tmp_path: Path):
    source = models.save("qwen3_moe", tmp_path / "model")
    from_hf(source, tmp_path / "run")
    done = call("convet_model_to_hf_unshard.sh", tmp_path / "run", "latest", "toy", HF_CONFIG=str(source))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/run/latest-hf: a qwen3_moe model" in done.stdout and "in bf16" in done.stdout
    done = call("convert_model_to_hf_unshard.sh", tmp_path / "run", "step0100", "7b")
    assert done.returncode == 2 and "iter_0000100: not a torch_dist checkpoint" in done.stderr


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("convert_model_to_hf_unshard.sh", (), "give RUN_DIR STEP SIZE"),
        ("convert_model_to_hf_unshard.sh", ("/", "100", "2b"), "SIZE is '2b'; use 1b, 7b or 9b"),
        ("convert_model_to_hf_unshard.sh", ("/nowhere", "100", "1b"), "RUN_DIR '/nowhere': no such folder"),
        ("convert_model_to_hf_unshard.sh", ("/", "last", "1b"), "STEP is 'last'; give an iteration, or latest"),
        ("convert_model_to_hf_unshard.sh", ("--run", "x", "100", "1b"), "does not know the option --run; see --help"),
        ("eval_full.sh", ("/", "--name", "x"), "does not know the option --name; see --help"),
        ("list_processed_files.sh", ("--dir", "x"), "does not know the option --dir; see --help"),
        ("../sync_service/two_sites.sh", ("--output", "x"), "takes no arguments, but was given: --output x"),
        ("eval_full.sh", ("/",), "give MODEL_PATH NAME"),
        ("eval_full.sh", ("/", "name"), "MODEL_PATH '/': no config.json; convert_model_to_hf_unshard.sh makes one"),
    ],
)
def test_bad_arguments_are_named(script: str, words: tuple[str, ...], said: str):
    done = call(script, *words)
    assert done.returncode != 0 and said in done.stderr
