# SPDX-License-Identifier: Apache-2.0
"""`run_pretrain`: run a real pretraining script on several ranks and look at what it computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.distributed import REPOSITORY, RankExit, run_failing_ranks, run_successful_ranks
from tests.support.pretrain_rank import Before, PatchMode, Probe, TrainRecord, pretrain_rank, shift_sampler

SCRIPT = "examples/pretrain_gpt.py"
TIMEOUT = 180.0


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What one rank of a successful run computed and wrote."""

    rank: int
    record: TrainRecord
    stdout: str
    stderr: str

    @property
    def losses(self) -> list[float]:
        """The language-model loss of each iteration; empty but on the last pipeline stage."""
        return [step.losses["lm loss"] for step in self.record.steps if step.losses]

    @property
    def grad_norms(self) -> list[float | None]:
        """The gradient norm of each iteration, before clipping."""
        return [step.grad_norm for step in self.record.steps]

    @property
    def parameters(self) -> list[dict[str, str]]:
        """Per model chunk, the MD5 of each parameter's bytes by its name in that chunk."""
        return self.record.parameters

    @property
    def optimizer(self) -> list[list[str]]:
        """Per chained optimizer, the MD5 of each authoritative (fp32, maybe sharded) parameter."""
        return self.record.optimizer

    @property
    def probe(self) -> Any:
        """What the probe returned."""
        return self.record.probe


def run_pretrain(
    arguments: Sequence[str],
    world_size: int,
    *,
    script: str = SCRIPT,
    patch: PatchMode = "script",
    probe: Probe | None = None,
    before: Before | Sequence[Before] = (),
    timeout: float = TIMEOUT,
) -> list[RankOutcome]:
    """Run `script` in-process on `world_size` ranks, as torchrun would.

    Args:
        arguments: the script's command line, for example from `tests.support.presets.toy_gpt`.
        world_size: number of ranks.
        script: path, absolute or from the repository's root.
        patch: "script" runs the file as it is (it calls `patch_megatron()` itself); "module" runs it as
            `python -m megatron_ext SCRIPT` does; "backend-only" is stock Megatron: the CPU backend where
            there is no CUDA device, and `patch_megatron()` does nothing.
        probe: `probe(model, optimizer, args)` called on each rank when training ends, result in `.probe`.
        before: called on each rank before the script, to install instruments. Both are picklable.
        timeout: seconds for the whole run.

    Raises:
        RankFailure: a rank failed or hung.
    """
    call = _call(arguments, script, patch, probe, before)
    return [
        RankOutcome(
            rank=rank_exit.rank, record=rank_exit.value, stdout=rank_exit.stdout, stderr=rank_exit.stderr
        )
        for rank_exit in run_successful_ranks(call, world_size, timeout=timeout)
    ]


def run_failing_pretrain(
    arguments: Sequence[str],
    world_size: int,
    *,
    script: str = SCRIPT,
    patch: PatchMode = "script",
    before: Before | Sequence[Before] = (),
    timeout: float = TIMEOUT,
) -> list[RankExit]:
    """Run bad input as `run_pretrain` would, and return how each rank ended.

    Raises:
        RankFailure: no rank failed.
    """
    return run_failing_ranks(_call(arguments, script, patch, None, before), world_size, timeout=timeout)


def as_worker(worker: int, workers: int) -> Before:
    """Return a `before` that feeds an ordinary job the samples of worker `worker` of `workers`.

    The job needs as many ranks as that worker, and `--global-batch-size` divided by `workers`. Its
    datasets are the same ones as long as one epoch is enough for both jobs, as with the toy presets.
    """
    return partial(shift_sampler, worker, workers)


def _call(
    arguments: Sequence[str],
    script: str,
    patch: PatchMode,
    probe: Probe | None,
    before: Before | Sequence[Before],
) -> Callable[[], TrainRecord]:
    instruments = (before,) if callable(before) else tuple(before)
    return partial(pretrain_rank, str(REPOSITORY / script), tuple(arguments), patch, probe, instruments)
