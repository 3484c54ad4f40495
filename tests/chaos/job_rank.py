# SPDX-License-Identifier: Apache-2.0
"""What a rank of a Megatron job does for the driver: it writes down what the job does and is told, and ends in time."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["prepare"]


def prepare(folder: str, name: str, interval_samples: int, step_seconds: float) -> None:
    """Before: make a rank one of a peer that the driver knows.

    Args:
        folder: where the driver and the peers leave their files.
        name: of the peer.
        interval_samples: samples of an interval.
        step_seconds: how much longer a step takes.
    """
    from megatron.training import training

    from megatron_ext.sync_service.peer.client import SyncClient
    from tests.sync_service import strain

    place = Path(folder)
    strain.install(str(place / f"{name}.strain"))
    with (place / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    told = _Told(place, name, interval_samples)
    SyncClient.begin = told.begin(SyncClient.begin)
    SyncClient.sync = told.sync(SyncClient.sync)
    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        time.sleep(step_seconds)
        return original(*args, **kwargs)

    training.train_step = train_step


class _Told:
    def __init__(self, folder: Path, name: str, interval_samples: int) -> None:
        self._folder, self._name, self._size = folder, name, interval_samples

    def begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `SyncClient.begin` that writes down what it is asked and what it finds."""

        @functools.wraps(original)
        def begin(client: Any, claim: Any, values: Any) -> Any:
            self._log("starts", round=claim.round, samples=claim.now.samples, whole=claim.whole)
            found = self._trying(original, client, claim, values)
            samples = (client.place or claim.begin).samples
            self._log("resumes", round=client.round, samples=samples, digest=client.digest)
            self._log("begins", round=client.round + 1, begin=samples)
            return found

        return begin

    def sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `SyncClient.sync` that writes down what goes and comes, and ends a training that is over."""

        @functools.wraps(original)
        def sync(client: Any, values: Any, report: Any, *rest: Any) -> Any:
            made_for, end = client.round + 1, report.progress.samples
            self._log("trained", round=made_for, begin=end - self._size, end=end)
            outcome = self._trying(original, client, self._poisoned(values), report, *rest)
            said = {"contributed": outcome.contributed, "contributors": outcome.contributors}
            place = {"round": client.round, "digest": client.digest}
            self._log("told", made_for=made_for, end=end, **place, **said, message=outcome.message)
            if client.round >= self._stop():
                self._log("ends", **place)
                _end_training()
            else:
                self._log("begins", round=client.round + 1, begin=end)
            return outcome

        return sync

    def _trying(self, function: Callable[..., Any], *args: Any) -> Any:
        from megatron_ext.errors import UserError

        try:
            return function(*args)
        except UserError as error:
            self._log("gave up", message=str(error))
            raise

    def _poisoned(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values as the driver wants them to be sent, which it says in a file to the first rank."""
        from tests.chaos.peer import POISON

        path = self._folder / f"{self._name}.poison"
        if os.environ["RANK"] != "0" or not path.exists():
            return values
        kind = path.read_text()
        path.unlink()
        self._log("poisoned", kind=kind)
        key = min(values)
        changed = values[key].clone()
        changed.view(-1)[0] = POISON[kind]
        return {**values, key: changed}

    def _stop(self) -> float:
        path = self._folder / "stop"
        return int(path.read_text()) if path.exists() else float("inf")

    def _log(self, event: str, **said: Any) -> None:
        if os.environ["RANK"] != "0":
            return
        line = {"event": event, "at": round(time.monotonic(), 3), "process": os.getpid(), **said}
        with (self._folder / f"{self._name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _end_training() -> None:
    from megatron.training import get_args

    args = get_args()
    args.train_iters = args.curr_iteration + 1
