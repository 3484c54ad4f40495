# SPDX-License-Identifier: Apache-2.0
"""examples/quickstart.sh from start to end, at a length that shows its promises but no interesting losses."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import REPOSITORY
from tests.support.megatron_checkout import python_path
from tests.support.processes import SESSION_MARK, session_processes

# Three runs of four processes each: a minute on two idle cores.
pytestmark = pytest.mark.timeout(600)

ITERATIONS = 13
REQUIRED = {
    "final_train_loss",
    "final_validation_loss",
    "ms_per_iteration",
    "cross_worker_bytes_per_iteration",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout in which the environment of this test stands in for .venv."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    stand_in = folder / "scripts" / "lib" / "python_env.sh"
    stand_in.parent.mkdir(parents=True)
    (stand_in.parent / "quickstart.sh").symlink_to(REPOSITORY / "scripts" / "lib" / "quickstart.sh")
    path = f'PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{python_path(REPOSITORY)}"'
    stand_in.write_text(f"use_python_env() {{ export {path}\n}}\n")
    return folder


def start(checkout: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(checkout / "examples" / "quickstart.sh"), *arguments],
        cwd=checkout.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a terminal: Ctrl-C reaches this process group.
        process_group=0,
    )


@pytest.fixture(scope="module")
def output(checkout: Path) -> Path:
    """Run the quickstart once, over the remains of another one, from another folder."""
    folder = checkout.parent / "quickstart output"
    for name in (
        "records/synchronous/rank7.json",
        "checkpoints/iter_0000007/old",
        ".megatron-ext-quickstart",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("old")
    process = start(checkout, "--iterations", str(ITERATIONS), "--output", folder.name, "--backend=cpu")
    text, _ = process.communicate(timeout=560)
    assert process.returncode == 0, text
    (folder / "stdout").write_text(text)
    return folder


def summary_of(output: Path) -> Any:
    return json.loads((output / "summary.json").read_text())


@pytest.mark.slow
def test_the_quickstart_writes_its_results(output: Path) -> None:
    summary = summary_of(output)
    for run in ("synchronous", "local_sgd"):
        assert summary[run].keys() >= REQUIRED
        assert 1 < summary[run]["final_validation_loss"] < 5.5
        assert 1 < summary[run]["final_train_loss"] < 5.5
        assert summary[run]["ms_per_iteration"] > 0
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG\r\n")
    text = (output / "stdout").read_text()
    for figure in ("final_train_loss", "final_validation_loss"):
        shown = [f"{summary[run][figure]:.4f}" for run in ("synchronous", "local_sgd")]
        assert re.search(rf"{shown[0]} +{shown[1]}", text)
    assert not list(output.rglob("rank7.json")) and not list(output.rglob("old"))


@pytest.mark.slow
def test_the_traffic_is_what_the_schedule_says(output: Path) -> None:
    summary = summary_of(output)
    synchronous, local_sgd = summary["synchronous"], summary["local_sgd"]
    steps = summary["settings"]["warmup"] + (ITERATIONS - summary["settings"]["warmup"]) // 3
    assert synchronous["iterations_with_cross_worker_traffic"] == ITERATIONS
    assert summary["cross_worker_bytes_ratio"] == (
        local_sgd["cross_worker_bytes_per_iteration"] / synchronous["cross_worker_bytes_per_iteration"]
    )
    assert summary["cross_worker_bytes_ratio"] == pytest.approx(steps / ITERATIONS, rel=1e-3)


@pytest.mark.slow
def test_the_synchronous_run_is_stock_and_the_resumed_one_equal(output: Path) -> None:
    summary = summary_of(output)
    assert summary["synchronous"]["patches"]["training"] == 0
    assert summary["local_sgd"]["patches"]["training"] > 0
    assert summary["resume_bit_exact"] is True
    first, resumed = (
        json.loads((output / "records" / run / "rank3.json").read_text()) for run in ("local_sgd", "resumed")
    )
    at = summary["settings"]["resumed_from_iteration"]
    assert resumed["first_iteration"] == at
    assert resumed["losses"] == first["losses"][at:] and len(resumed["losses"]) == ITERATIONS - at


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_old_result(checkout: Path, output: Path) -> None:
    process = start(checkout, "--iterations", "100000", "--output", str(output), "--backend", "cpu")
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if " iteration " in line and "/100000 " in line:
            break
    assert ranks_running(), "".join(seen)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "quickstart: interrupted, nothing is left running"
    assert not ranks_running()
    assert not (output / "summary.json").exists() and not (output / "losses.png").exists()
    assert "up to date" in (output / "corpus.log").read_text()


def ranks_running() -> list[str]:
    return [
        found.command for found in session_processes(os.environ[SESSION_MARK]) if "measured_pretrain" in found.command
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--iterations", "5"], "quickstart: error: --iterations is 5; it must be at least 12"),
        (["--itertions", "50"], "quickstart.sh: error: unknown argument --itertions (see --help)"),
        (["--iterations"], "quickstart.sh: error: --iterations needs a value (see --help)"),
        (["--output", "."], "is something else than a quickstart's output; give a new folder"),
    ],
    ids=["too-short", "misspelt", "no-value", "foreign-folder"],
)
def test_bad_options_get_one_line(checkout: Path, arguments: list[str], complaint: str) -> None:
    process = start(checkout, *arguments)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complaint in text and len(text.splitlines()) == 1


def test_help_needs_no_environment(checkout: Path) -> None:
    process = start(checkout, "--iterations", "5", "--help")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--iterations N" in text and "--output DIR" in text and "--backend" in text
