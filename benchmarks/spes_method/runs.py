# SPDX-License-Identifier: Apache-2.0
"""Runs of the plain replicas on real text, which are made once and remembered."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.runs import digest_of
from benchmarks.spes_method.model import Sizes, initial
from benchmarks.spes_method.training import Adam, Merging, Method, block_owners, train

__all__ = ["SIZES", "Finished", "Methods", "Run", "Runs", "equivalent"]

SIZES = Sizes(hidden=48, width=24)
"""Of a study's model."""

_HELD_OUT = 256
"""Sequences of a validation, the same in all runs."""

_CODE = ("model.py", "runs.py", "training.py")
"""Files that decide what a run measures."""

_TRAINED_SHARE = 0.95
"""Of the corpus; the rest is for validation."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; what makes it another one is in here."""

    replicas: int
    sequences: int
    """Of a replica's step."""
    rate: float
    """The largest learning rate; a tenth of it is the smallest."""
    steps: int
    warmup: int
    seed: int
    """Of the first weights and of the samples."""
    owners: int
    """Of every expert."""
    interval: int = 1
    """Steps between two rounds."""
    common_gradients: bool = False
    merge_every: int = 0
    """Steps; 0 to merge nothing."""
    merge_alpha: float = 0.0
    merge_until: int = 0
    validations: int = 4
    """Of a run, after as many steps each, which are whole intervals."""
    sizes: Sizes = SIZES

    @property
    def method(self) -> Method:
        """How the replicas train."""
        merging = Merging(every=self.merge_every, alpha=self.merge_alpha, until=self.merge_until)
        return Method(
            owners=block_owners(self.replicas, self.sizes.experts, self.owners),
            interval=self.interval,
            common_gradients=self.common_gradients,
            merging=merging if self.merge_every else None,
        )

    @property
    def adam(self) -> Adam:
        """The optimizer."""
        return Adam(rate=self.rate, least=self.rate / 10, warmup=self.warmup, steps=self.steps)

    @property
    def tokens(self) -> int:
        """Of all replicas together."""
        return self.replicas * self.sequences * self.steps * self.sizes.context

    @property
    def name(self) -> str:
        """Of its file."""
        how = "common" if self.common_gradients else f"h{self.interval}"
        merging = f"-merge{self.merge_every}x{self.merge_alpha:g}" if self.merge_every else ""
        what = f"{self.replicas}x{self.sequences}-{how}-owners{self.owners}{merging}"
        return f"{what}-lr{self.rate:g}-steps{self.steps}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a run measured."""

    run: dict[str, object]
    """`Run` as a dictionary; a file with another one is made again."""
    corpus: str
    """Its digest; likewise."""
    code: str = ""
    """Digest of what trained, and torch's version; likewise."""
    seconds: float
    validation: dict[str, float]
    """By steps finished."""

    @property
    def final(self) -> float:
        """The validation loss at the end."""
        return self.validation[max(self.validation, key=int)]


type Methods = Mapping[str, tuple[str, Run]]
"""Title and run by the method's name in cases."""


class Runs:
    """The runs in a folder."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        """Read the corpus.

        Args:
            folder: of the files of finished runs.
            corpus: prefix of the tokens.
        """
        self._folder = folder
        self._digest = digest_of(corpus)
        self._code = _digest_of_code()
        self._tokens = torch.from_numpy(np.fromfile(corpus.with_suffix(".bin"), np.uint16).astype(np.int16))

    def finished(self, run: Run) -> Finished | None:
        """Return what a run measured; None if it was not made with these settings."""
        file = self._folder / f"{run.name}.json"
        if not file.is_file():
            return None
        found = Finished(**json.loads(file.read_text(encoding="utf-8")))
        wanted = (asdict(run), self._digest, self._code)
        return found if (found.run, found.corpus, found.code) == wanted else None

    def final(self, run: Run) -> float:
        """Return the validation loss at the end.

        Raises:
            RuntimeError: the run is not finished.
        """
        found = self.finished(run)
        if found is None:
            raise RuntimeError(f"{self._folder / run.name}.json is missing, or of another run that has the same name")
        return found.final

    def make_missing(self, wanted: Sequence[Run]) -> None:
        """Make the runs that are not finished, and say how they went."""
        missing = [run for run in dict.fromkeys(wanted) if self.finished(run) is None]
        print(f"{len(wanted)} runs, {len(missing)} of them still to make", flush=True)
        for run in missing:
            found = self._make(run)
            print(f"{run.name}: validation loss {found.final:.4f} after {found.seconds:.0f} s", flush=True)

    def _make(self, run: Run) -> Finished:
        begin = time.monotonic()
        random = torch.Generator().manual_seed(run.seed)
        first_held_out = int(len(self._tokens) * _TRAINED_SHARE)
        rows, long = run.replicas * run.sequences, run.sizes.context + 1

        def batch(_step: int) -> Tensor:
            # Drawn in order, so that all runs of a seed with as many sequences a step see the same ones.
            starts = torch.randint(first_held_out - long, (rows,), generator=random)
            taken = self._tokens[starts[:, None] + torch.arange(long)].long()
            return taken.view(run.replicas, run.sequences, long)

        starts = torch.linspace(first_held_out, len(self._tokens) - long, _HELD_OUT).long()
        held_out = self._tokens[starts[:, None] + torch.arange(long)].long()
        validation = run.steps // run.validations, held_out
        trained = train(initial(run.sizes, run.seed), run.sizes, run.method, run.adam, batch, validation)
        found = Finished(
            run=asdict(run),
            corpus=self._digest,
            code=self._code,
            seconds=round(time.monotonic() - begin, 1),
            validation={str(at): loss for at, loss in trained.validation.items()},
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{run.name}.partial"
        partial.write_text(json.dumps(asdict(found)), encoding="utf-8")
        partial.replace(self._folder / f"{run.name}.json")
        return found


def _digest_of_code() -> str:
    """Return the SHA-256 of what trains: a run of other code may have another loss."""
    folder = Path(__file__).parent
    found = hashlib.sha256(torch.__version__.encode())
    for name in _CODE:
        found.update((folder / name).read_bytes())
    return found.hexdigest()


def equivalent(loss: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return with which share of its tokens the reference reaches a loss, by the logarithm of the tokens.

    Args:
        loss: which one.
        curve: (share of the tokens, loss) of reference runs of other lengths, each with a whole schedule.

    Returns:
        The share; beyond both ends of the curve, that end.
    """
    points = sorted(curve, key=lambda point: point[1])
    logarithms = np.interp(loss, [lower for _, lower in points], [np.log(share) for share, _ in points])
    return float(np.exp(logarithms))
