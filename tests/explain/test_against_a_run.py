# SPDX-License-Identifier: Apache-2.0
"""What is predicted is what a run has: parameters, bytes of memory, messages and files."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.local_sgd.reporting.round_log import read_rounds
from tests.explain.commands import explained
from tests.local_sgd.runs import arguments
from tests.support.pretrain import RankOutcome, run_pretrain

WORLD = 4
LARGE = {"hidden_size": 64, "vocab_size": 2048, "num_layers": 2}
"""Large enough that a checkpoint's files are mostly tensors."""


def held(model: Any, optimizer: Any, args: Any) -> dict[str, Any]:
    """Return what this rank holds at the end of a run."""
    from megatron_ext.hooks import hooks

    engine = next(feature for feature in hooks.active if feature.name == "local-sgd")._require_worker().engine
    buffers = [buffer for chunk in model for buffer in chunk.buffers]
    states = [value for member in optimizer.chained_optimizers for value in member.optimizer.state.values()]
    shards = [fragment.state.shard for fragment in engine.fragments]
    runs = [(shard, run) for shard in shards for run in range(len(shard.anchors))]
    masters = [
        main
        for member in optimizer.chained_optimizers
        for group in member.shard_fp32_from_float16_groups
        for main in group
    ]
    return {
        "parameters": sum(parameter.numel() for chunk in model for parameter in chunk.parameters()),
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "fp32 master parameters": sum(main.nbytes for main in masters),
        "optimizer states": sum(value.nbytes for state in states for value in state.values() if value.dim()),
        "anchor of local SGD": sum(anchor.nbytes for shard in shards for anchor in shard.anchors),
        "outer optimizer's states": sum(state.nbytes for shard, run in runs for state in shard.optimizer.states(run)),
    }


def command(save: Path | str) -> list[str]:
    return arguments(
        "single",
        "bf16-distopt",
        workers=2,
        batch=4,
        local_sgd_sync_interval=2,
        train_iters=2,
        save=str(save),
        save_interval=2,
        ckpt_format="torch_dist",
        **LARGE,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RankOutcome], Path]:
    folder = tmp_path_factory.mktemp("run")
    return run_pretrain(command(folder), WORLD, probe=held), folder


@cache
def prediction() -> dict[str, Any]:
    return explained(WORLD, command("nowhere"))


def test_every_byte_of_memory_that_is_counted_is_that_of_the_run(run: tuple[list[RankOutcome], Path]):
    outcomes, _ = run
    (figures,) = prediction()["ranks"]
    predicted = {use["cause"]: use["nbytes"] for use in figures["memory"] if not use["by_formula"]}
    real = dict(outcomes[figures["rank"]].probe)
    assert figures["parameters"] == real.pop("parameters")
    assert predicted == real


def test_a_round_sends_the_bytes_that_were_predicted(run: tuple[list[RankOutcome], Path]):
    _, folder = run
    (figures,) = prediction()["ranks"]
    predicted = sum(use["nbytes"] for use in figures["traffic"] if use["across"])
    assert [entry["bytes_sent"] for entry in read_rounds(folder)] == [predicted]


def test_a_checkpoint_holds_the_bytes_that_were_predicted(run: tuple[list[RankOutcome], Path]):
    _, folder = run
    predicted = sum(part["nbytes"] for part in prediction()["job"]["checkpoint"])
    entries = FileSystemReader(folder / "iter_0000002").read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    assert sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors) == predicted
    files = sum(file.stat().st_size for file in (folder / "iter_0000002").iterdir())
    assert predicted < files < 1.1 * predicted


def test_nothing_is_written_by_a_prediction():
    prediction()
    assert not Path("nowhere").exists()


def test_the_workers_and_their_ranks_are_those_of_the_run():
    job = prediction()["job"]
    assert job["workers"] == [[0, 1], [2, 3]]
    assert job["sizes"]["dp"] == 4
    assert job["facts"]["local-sgd"]["interval"] == 2
