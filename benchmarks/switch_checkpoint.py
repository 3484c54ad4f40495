# SPDX-License-Identifier: Apache-2.0
"""The way round by a checkpoint, for switches to be compared with: Megatron's torch_dist format, saved under one layout
and loaded under another, by processes that run already or by new ones.

`benchmarks/switch.py` uses it, and starts it under torchrun as the new processes:

    torchrun ... -m benchmarks.switch_checkpoint FOLDER LAYOUT LAYERS HIDDEN VOCAB
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.ranks.switching import Setting
    from megatron_ext.params import GptShape, Layout

__all__ = ["rank_seconds", "restart_seconds"]

REPOSITORY = Path(__file__).resolve().parents[1]
LOADED = "checkpoint is loaded"


def sharded_state(shape: GptShape, layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a rank's tensors as Megatron's checkpoints describe them, each part that is one box by itself.

    Args:
        shape: of a dense model with untied embeddings.
        layout: of all ranks.
        rank: this process.
        tensors: what the rank holds, by name.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_ext.params import Placement

    place, state = layout.coordinates(rank), {}
    for placed in Placement(shape, layout).on_rank(rank):
        for number, piece in enumerate(placed.slice.pieces):
            local = tensors[placed.name]
            offsets = []
            for axis, (start, size, whole) in enumerate(
                zip(piece.global_start, piece.shape, placed.tensor.shape, strict=True)
            ):
                local = local.narrow(axis, piece.local_start[axis], size)
                offsets.append((axis, start // size, whole // size))
            state[f"{placed.name}/{number}"] = ShardedTensor.from_rank_offsets(
                placed.tensor.name,
                local,
                *offsets,
                replica_id=(0, place.tp if placed.is_duplicate_across_tp else 0, placed.replica),
            )
    return state


def rank_seconds(
    switch: tuple[tuple[int, int, int], tuple[int, int, int]], setting: Setting, folder: str
) -> dict[str, list[float]]:
    """Run on one rank: return the seconds of switching, and of saving and loading, pair by pair.

    Args:
        switch: DP, TP, PP before and after.
        setting: the model; its pairs and warm-up are those of switches.
        folder: of the checkpoints, each in a folder of its own; the first one is `0`.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from benchmarks.ranks.switching import executor_of, held, measure_by_turns, start
    from megatron_ext.params import Layout

    start()
    # Megatron would spawn this process at the first save; forked it is ready at once.
    get_write_results_queue(mp_mode="fork")
    shape, rank, count = setting.shape(), dist.get_rank(), itertools.count()
    source, target = (Layout(dp=dp, tp=tp, pp=pp) for dp, tp, pp in switch)
    tensors, expected = held(shape, source, rank), held(shape, target, rank)
    results = {name: torch.zeros_like(value) for name, value in expected.items()}
    saved, wanted = (sharded_state(shape, *each) for each in ((source, rank, tensors), (target, rank, results)))
    loaded: dict[str, Any] = {}

    def save_and_load() -> None:
        place = Path(folder) / str(next(count))
        place.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(saved, str(place))
        loaded.update(dist_checkpointing.load(wanted, str(place)))

    executor = executor_of(setting, source, target)
    sides: dict[str, Callable[[], object]] = {
        "switch": lambda: executor.switch(tensors),
        "save_load": save_and_load,
    }
    seconds = measure_by_turns(sides, pairs=setting.pairs, warmup=setting.warmup)
    require_loaded(loaded, sharded_state(shape, target, rank, expected))
    return seconds


def require_loaded(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a checkpoint that does not hold what was saved; `expected` is a sharded state."""
    import torch

    wrong = [name for name, part in expected.items() if not torch.equal(loaded[name], part.data)]
    if wrong or not expected:
        raise RuntimeError(f"not what was saved: {', '.join(wrong)}")


def restart_seconds(folder: Path, layout: tuple[int, int, int], setting: Setting, *, ranks: int) -> float:
    """Start new processes that load a checkpoint; return the seconds until all of them have it.

    Their way there is that of a training run: start, imports, process groups, loading. What a run does besides, and the
    saving before, are not counted.

    Args:
        folder: of the checkpoint.
        layout: DP, TP, PP of the new processes.
        setting: the model.
        ranks: processes.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.switch_checkpoint", str(folder), ",".join(map(str, layout))]
    command += [str(size) for size in (setting.layers, setting.hidden, setting.vocab)]
    begin, output = time.perf_counter(), []
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        seconds = None
        for line in process.stdout:
            output.append(line)
            if LOADED in line:
                seconds = time.perf_counter() - begin
    if process.returncode or seconds is None:
        raise RuntimeError(f"the restarted processes failed:\n{''.join(output)[-4000:]}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Load a checkpoint as one rank of a job that has just been started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("layout")
    parser.add_argument("sizes", nargs=3, type=int)
    options = parser.parse_args(arguments)

    import megatron.training  # noqa: F401  # as a training run does
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from benchmarks.ranks.switching import Setting, held, start
    from megatron_ext.params import Layout, Placement

    start()
    layers, hidden, vocab = options.sizes
    shape = Setting(layers=layers, hidden=hidden, vocab=vocab, pairs=1, warmup=0).shape()
    dp, tp, pp = map(int, options.layout.split(","))
    layout, rank = Layout(dp=dp, tp=tp, pp=pp), dist.get_rank()
    placed = Placement(shape, layout).on_rank(rank)
    results = {each.name: torch.zeros(each.slice.local_shape, dtype=shape.dtype) for each in placed}
    loaded = dist_checkpointing.load(sharded_state(shape, layout, rank, results), options.folder)
    dist.barrier()
    if rank == 0:
        print(LOADED, flush=True)
    require_loaded(loaded, sharded_state(shape, layout, rank, held(shape, layout, rank)))
    return 0


if __name__ == "__main__":
    code = main()
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.exit(code)
