# SPDX-License-Identifier: Apache-2.0
"""The example of an extension: installed as anybody's package, it is in the next run, and says what Megatron says."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.distributed import REPOSITORY
from tests.support.ports import free_port
from tests.support.presets import LAYOUTS, PRECISIONS, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain

EXAMPLE = REPOSITORY / "examples" / "extension"
LOGS = {"parameter_norm_interval": 2, "log_params_norm": True}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip leaves it; built from a copy, because a build leaves folders behind."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for path in EXAMPLE.rglob("*"):
        if path.suffix in (".py", ".toml"):
            copy = sources / path.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run(
        [*command, "--target", str(target), str(sources)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def launch(installed: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Train with the command that the documentation shows, on one rank, with the package beside the others."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join([str(installed), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext", str(REPOSITORY / "examples" / "pretrain_gpt.py"), *arguments],
        env={**os.environ, **place, "MASTER_PORT": str(free_port()), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def norms(output: str) -> list[tuple[str, str | None, str | None]]:
    """Return (iteration, Megatron's norm, the example's) of every iteration line."""
    found = []
    for line in output.splitlines():
        if match := re.search(r" iteration +(\d+)/", line):
            said = [re.search(rf"\| {label}: ([\d.]+) \|", line) for label in ("params norm", "parameter norm")]
            found.append((match[1], *(None if norm is None else norm[1] for norm in said)))
    return found


def use(installed: Path) -> None:
    """Let this process find the package."""
    sys.path.insert(0, str(installed))


def test_an_installed_feature_is_in_the_next_run(installed: Path):
    done = launch(installed, toy_gpt(**LOGS))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = norms(done.stdout)
    assert [iteration for iteration, _, _ in lines] == ["1", "2", "3", "4"]
    assert [own for _, _, own in lines] == [None, lines[1][1], None, lines[3][1]]
    assert lines[1][1] != lines[3][1]


@pytest.mark.parametrize(
    ("layout", "precision"), [("tp2-sp", "fp32"), ("pp2", "bf16"), ("moe-ep2", "bf16-distopt-overlap")]
)
def test_each_parameter_counts_once_in_every_layout(installed: Path, layout: str, precision: str):
    arguments = toy_gpt(LAYOUTS[layout].options, PRECISIONS[precision], **LOGS)
    ranks = run_pretrain(arguments, LAYOUTS[layout].world_size(), before=partial(use, installed))
    ((_, stock, own),) = [line for line in norms(ranks[-1].stdout) if line[0] == "4"]
    assert stock is not None and own == stock


def test_its_values_are_checked_with_those_of_the_other_features(installed: Path):
    wrong = {"parameter_norm_interval": 3, "log_interval": 2, "use_local_sgd": True, "local_sgd_workers": 0}
    (ended,) = run_failing_pretrain(toy_gpt(**wrong), 1, before=partial(use, installed))
    assert ended.exit_code not in (0, None)
    assert "arguments: 3 problems" in ended.traceback and "--local-sgd-workers" in ended.traceback
    assert "--parameter-norm-interval 3: give a positive multiple of --log-interval 2" in ended.traceback
    assert "--parameter-norm-interval: workers of local SGD would wait for its sum" in ended.traceback


def use_without_patches(installed: Path) -> None:
    """Let this process find the package, in which somebody has forgotten what raises the events."""
    use(installed)
    from megatron_ext_example.parameter_norm import ParameterNorm

    ParameterNorm.required_patches = lambda self: []


def test_a_feature_that_has_forgotten_its_patches_is_refused_before_training(installed: Path):
    (ended,) = run_failing_pretrain(toy_gpt(**LOGS), 1, before=partial(use_without_patches, installed))
    said = "the feature 'parameter-norm' has what no patch of this run calls: TrainStart, TrainingLog; add the patches"
    assert said in ended.traceback


def test_without_its_flag_it_changes_nothing(installed: Path):
    arguments = toy_gpt()
    with_package = run_pretrain(arguments, 1, before=partial(use, installed), probe=names_in_force)
    without = run_pretrain(arguments, 1, probe=names_in_force)
    assert with_package[0].parameters == without[0].parameters and with_package[0].losses == without[0].losses
    assert with_package[0].probe[1] == without[0].probe[1]
    assert set(with_package[0].probe[0]) - set(without[0].probe[0]) == {"parameter-norm"}


def names_in_force(model, optimizer, args) -> tuple[list[str], list[str]]:
    """Probe: the features that are there, and the patches that are applied."""
    from megatron_ext.activation import registry
    from megatron_ext.hooks import hooks

    return [feature.name for feature in hooks.features], [patch.name for patch in registry().applied]
