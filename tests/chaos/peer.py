# SPDX-License-Identifier: Apache-2.0
"""A synthetic peer: a process with a plain PyTorch loop that writes down what it does and what it is told."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient
from megatron_ext.sync_service.protocol.frames import whole_box
from megatron_ext.sync_service.protocol.report import Progress
from megatron_ext.sync_service.protocol.resuming import Claim
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from tests.chaos.settings import BATCH, RUN, STEPS, Settings, peer_name
from tests.chaos.task import Task, Values

__all__ = ["POISON", "digest_of", "run"]

POISON = {"nan": float("nan"), "infinity": float("inf"), "huge": 1e20, "large": 1e3}


def digest_of(values: Values) -> str:
    """Return the digest that the server has of the same values."""
    total = RoundDigest()
    for name, value in values.items():
        total.add(name, tuple(value.shape), whole_box(tuple(value.shape)), value)
    return total.hex()


def run(job: dict[str, Any]) -> int:
    """Train until the file `stop` names a round that is there; return the exit code.

    Args:
        job: `settings`, `index`, `server` (address), `files` for its connection, and `folder`, where the peer's are.
    """
    return _Peer(job).run()


class _Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._settings = Settings(**job["settings"])
        self._index, self._folder = job["index"], Path(job["folder"])
        self._name = peer_name(self._index)
        self._task = Task(self._settings.seed, self._settings.owners)
        self._server, self._files = job["server"], job["files"]

    def run(self) -> int:
        config = ClientConfig(
            connection=ConnectionConfig(server=self._server, patience_seconds=180, call_seconds=5, **self._files),
            run=RUN,
            peer=self._name,
            index=self._index,
            peers=self._settings.peers,
            codec=self._settings.codec,
            frame_bytes=4096,
            call_bytes=65_536,
            round_seconds=240,
            heartbeat_seconds=0.5,
        )
        with SyncClient(config, self._task.catalog) as client:
            try:
                self._train(client)
            except UserError as error:
                self._log("gave up", message=str(error))
                return 2
        return 0

    def _train(self, client: SyncClient) -> None:
        values, samples = self._begin(client)
        saved = client.round
        while client.round < self._stop():
            made_for, begin = client.round + 1, samples
            self._log("begins", round=made_for, begin=begin)
            trained, loss = self._task.interval(values, self._index, self._settings.peers, begin)
            time.sleep(STEPS * self._settings.step_seconds)
            samples = begin + STEPS * BATCH
            self._log("trained", round=made_for, begin=begin, end=samples)
            outcome = client.sync(self._poisoned(trained), _report(loss, samples))
            values = outcome.values
            self._log(
                "told",
                made_for=made_for,
                end=samples,
                round=outcome.number,
                digest=digest_of(values),
                contributed=outcome.contributed,
                contributors=list(outcome.contributors),
                message=outcome.message,
            )
            if client.round >= saved + self._settings.save_every:
                self._save(client, values, samples)
                saved = client.round
        torch.save(values, self._folder / f"{self._name}.final")
        self._log("ends", round=client.round, digest=digest_of(values))
        client.leave()

    def _begin(self, client: SyncClient) -> tuple[Values, int]:
        """Return the values and the samples that training resumes with."""
        path = self._folder / f"{self._name}.checkpoint"
        saved = torch.load(path) if path.exists() else None
        now = _progress(0 if saved is None else saved["samples"])
        claim = Claim(steps=STEPS, begin=now, now=now)
        if saved is not None:
            client.residuals = saved["residuals"]
            claim = Claim(round=saved["round"], digest=saved["digest"], whole=True, steps=STEPS, begin=now, now=now)
        self._log("starts", round=claim.round, samples=now.samples, whole=claim.whole)
        taken = client.begin(claim, self._task.start)
        values = saved["values"] if taken is None else taken
        samples = (client.place or now).samples
        self._log(
            "resumes", round=client.round, samples=samples, digest=digest_of(values), resends=not client.uploaded
        )
        return values, samples

    def _save(self, client: SyncClient, values: Values, samples: int) -> None:
        path = self._folder / f"{self._name}.checkpoint"
        content = {
            "round": client.round,
            "digest": client.digest,
            "values": values,
            "samples": samples,
            "residuals": client.residuals,
        }
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def _poisoned(self, values: Values) -> Values:
        """Return values as the driver wants them to be sent, which it says in a file."""
        path = self._folder / f"{self._name}.poison"
        if not path.exists():
            return values
        kind = path.read_text()
        path.unlink()
        self._log("poisoned", kind=kind)
        # The last one of its own: with experts, one that the server has from few.
        name = [spec.name for spec in self._task.catalog if spec.is_trained_by(self._index)][-1]
        poisoned = values[name].clone()
        poisoned.view(-1)[0] = POISON[kind]
        return {**values, name: poisoned}

    def _stop(self) -> float:
        path = self._folder / "stop"
        return int(path.read_text()) if path.exists() else float("inf")

    def _log(self, event: str, **said: Any) -> None:
        line = {"event": event, "at": round(time.monotonic(), 3), "process": os.getpid(), **said}
        with (self._folder / f"{self._name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _progress(samples: int) -> Progress:
    return Progress(samples // BATCH, samples, samples, BATCH)


def _report(loss: float, samples: int) -> Report:
    return Report(loss=loss, steps=STEPS, progress=_progress(samples))
