# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/vs_atorch.py` at toy size: it runs, reports what it promises, and says so when atorch is not available.

Tests have no network, so a small stand-in takes atorch's place where it is not about atorch itself.
"""

import sysconfig
from pathlib import Path

import pytest

from benchmarks import atorch_environment, vs_atorch
from benchmarks.atorch_rounds import PLAIN, Setting, rank_times
from tests.benchmarks.reports import read_cases
from tests.support.distributed import RankFailure, run_ranks

TINY = ["--layers", "1", "--hidden", "8", "--vocab", "16", "--pairs", "2", "--warmup", "1", "--workers", "2"]
CASES = {"plain_w2_speedup": 3, "penalty_w2_speedup": 4}

CONFIGS = """
from types import SimpleNamespace
LocalSGDConfig = GTAConfig = OuterOptimizerConfig = SimpleNamespace
"""

# Averages tensor by tensor, as the real one does; it ignores the penalty.
AVERAGER = """
import torch.distributed as dist
import torch

class OuterOptimPeriodicModelAverager:
    def __init__(self, local_sgd_config, gta_config, outer_optim_config):
        self.outer, self.anchors = outer_optim_config, None

    @torch.no_grad()
    def average_parameters(self, parameters):
        if self.anchors is None:
            self.anchors = [parameter.detach().clone() for parameter in parameters]
            self.optimizer = self.outer.outer_optim_class(self.anchors, **self.outer.outer_optim_kwargs)
        for anchor, parameter in zip(self.anchors, parameters):
            anchor.grad = (anchor - parameter) / DIVISOR
            dist.all_reduce(anchor.grad)
        self.optimizer.step()
        for anchor, parameter in zip(self.anchors, parameters):
            parameter.copy_(anchor)
"""


def stand_in(folder: Path, divisor: str = "dist.get_world_size()") -> Path:
    """Write an environment with a package of atorch's names; return the folder of its packages."""
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in (f"atorch-{atorch_environment.RELEASE}.dist-info", "grpc", "atorch/local_sgd"):
        (packages / name).mkdir(parents=True)
    (packages / "atorch" / "local_sgd" / "configs.py").write_text(CONFIGS)
    (packages / "atorch" / "local_sgd" / "DDP.py").write_text(AVERAGER.replace("DIVISOR", divisor))
    return packages


def check_report(path: Path) -> None:
    cases = read_cases(path)
    speedups = {name: case for name, case in cases.items() if name.endswith("_speedup")}
    assert {name: case["goal"] for name, case in speedups.items()} == CASES
    for name, case in speedups.items():
        assert (case["unit"], case["direction"]) == ("ratio", "higher")
        assert case["value"] > 0
        # Of the same pairs: what a round could take at least.
        assert cases[name.removesuffix("speedup") + "over_least"]["value"] > 0
        assert cases[f"{name}_of_least"]["value"] > 0
    held = cases["held_models"]
    assert (held["unit"], held["direction"]) == ("models", "lower")
    # Two models and the embedding, which is the largest unit: (16 + 1024) x 8 of 9,208 parameters.
    assert held["goal"] == pytest.approx(2 + 8320 / 9208, abs=1e-3)


@pytest.mark.slow
def test_both_methods_and_the_memory_are_reported(tmp_path, capsys):
    path = tmp_path / "report.json"
    stand_in(tmp_path / "env")
    assert vs_atorch.main([*TINY, "--env", str(tmp_path / "env"), "--json", str(path)]) == 0
    check_report(path)
    assert "penalty_w2_speedup" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(
    not atorch_environment.installed(vs_atorch.parser().parse_args([]).env),
    reason="needs atorch, which `python -m benchmarks.vs_atorch` installs from a package index; tests have no network",
)
def test_the_published_atorch_stands_on_the_other_side(tmp_path):
    path = tmp_path / "report.json"
    assert vs_atorch.main([*TINY, "--json", str(path)]) == 0
    check_report(path)


def test_sides_that_did_not_do_the_same_are_no_comparison(tmp_path):
    setting = Setting(
        shapes=[(4, 3), (3,)],
        units=["layer.0", "layer.0"],
        method=PLAIN,
        pairs=1,
        warmup=0,
        atorch=str(stand_in(tmp_path, divisor="1")),
    )
    with pytest.raises(RankFailure, match="the two sides ended with different weights, first in"):
        run_ranks(rank_times, 2, setting)


def test_memory_is_counted_in_sizes_of_the_model(tmp_path):
    """An averager that keeps anchor, gradient and momentum holds three models."""
    from benchmarks.atorch_rounds import ATORCH, OURS, rank_memory

    setting = Setting(
        shapes=[(1024, 1024)] * 8,
        units=[f"layer.{index}" for index in range(8)],
        method=PLAIN,
        pairs=1,
        warmup=0,
        atorch=str(stand_in(tmp_path)),
    )
    model = 8 * 4 * 2**20
    atorch, ours = (max(found.held for found in run_ranks(rank_memory, 2, setting, side)) for side in (ATORCH, OURS))
    assert atorch / model == pytest.approx(3, abs=0.3)
    # Anchor and momentum, each shared between the two workers.
    assert ours / model == pytest.approx(1, abs=0.3)


def test_without_a_package_index_it_says_what_is_needed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert vs_atorch.main(["--env", str(tmp_path / "env")]) == 2
    said = capsys.readouterr().err
    assert f"atorch=={atorch_environment.RELEASE} and grpcio cannot be installed there" in said
    assert "needs a package index that pip reaches" in said
    assert "No matching distribution found" in said


def test_an_environment_that_cannot_be_imported_is_named(tmp_path, capsys):
    packages = stand_in(tmp_path / "env")
    (packages / "atorch" / "local_sgd" / "DDP.py").write_text("import nothing_of_that_name")
    assert vs_atorch.main(["--env", str(tmp_path / "env")]) == 2
    said = capsys.readouterr().err
    assert f"--env {tmp_path / 'env'}: the atorch in it cannot be imported" in said
    assert "nothing_of_that_name" in said
