# SPDX-License-Identifier: Apache-2.0
"""examples/hot_switch/quickstart.py: its command lines train, and it reads what they log."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ext.hot_switch import read_strategies
from tests.support.corpus import make
from tests.support.distributed import REPOSITORY
from tests.support.pretrain import run_pretrain

SHORT = {"--num-layers": "2", "--hidden-size": "32", "--seq-length": "64", "--max-position-embeddings": "64"}


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "hot_switch_quickstart", REPOSITORY / "examples" / "hot_switch" / "quickstart.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_runs_train_the_same_documents_and_their_logs_are_understood(
    tmp_path: Path, quickstart: ModuleType
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("x = 1\n" * (1 + number % 10))
    make(tmp_path / "text", tmp_path / "corpus")
    runs = [
        quickstart.Run(strategies=quickstart.HOT, buckets=(64, 32, 16, 0)),
        quickstart.Run(strategies=quickstart.HOT[:1], buckets=(64, 0)),
    ]
    for run in runs:
        words = quickstart.command(run, tmp_path / "corpus", 3)
        words = words[words.index(str(REPOSITORY / "examples" / "pretrain_gpt.py")) + 1 :]
        for flag, value in SHORT.items():
            words[words.index(flag) + 1] = value
        for rank in run_pretrain(words, quickstart.PROCESSES):
            for line in rank.stdout.splitlines():
                run.read_line(line)
        assert len(run.losses) == len(run.tokens) == len(run.padding) == 3
    hot, static = runs
    assert hot.losses == pytest.approx(static.losses, rel=1e-5)
    assert hot.tokens == static.tokens
    assert len(hot.switching) == 3
    assert [name for name, *_ in hot.guests] == list(quickstart.HOT[1:])
    assert not static.guests
    assert f"the hot run's losses and those of {static.title}, its home: " in quickstart.report(runs)
    quickstart.plot(runs, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_strategies_and_buckets_belong_together(quickstart: ModuleType) -> None:
    read = read_strategies(
        quickstart.HOT, quickstart.BUCKETS, world_size=quickstart.PROCESSES, seq_length=quickstart.CONTEXT
    )
    assert [bucket.up_to for bucket in read.buckets] == [1024, 256, 512]


def test_documents_are_functions_and_methods(quickstart: ModuleType) -> None:
    found = list(quickstart.definitions())
    assert len(found) > 1000
    assert all(text.startswith(("def ", "class ", "async def ")) for text in found[:200])


def test_the_hot_runs_losses_are_seen_where_they_are_those_of_its_home(quickstart: ModuleType) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra `plots` is not installed")
    figure, axes = pyplot.subplots()
    runs = [quickstart.Run(strategies=quickstart.HOT[:count], buckets=(), losses=[3.0, 2.0]) for count in (3, 1)]
    quickstart.draw_losses(axes, runs)
    home, hot = axes.get_lines()
    assert (home.get_label(), hot.get_label()) == (runs[1].title, runs[0].title)
    assert home.get_linestyle() == "-"
    assert (hot.get_linestyle(), hot.get_marker(), hot.get_fillstyle()) == ("None", "o", "none")
    pyplot.close(figure)


def test_the_first_lines_say_that_speed_is_not_what_it_shows(quickstart: ModuleType) -> None:
    assert "does not show: speed" in quickstart.PURPOSE.splitlines()[0]
