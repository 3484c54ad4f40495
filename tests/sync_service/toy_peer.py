# SPDX-License-Identifier: Apache-2.0
"""A peer for tests: 'trains' by adding numbers that depend on its index and the round, and writes down what it saw."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, RoundOutcome, SyncClient
from megatron_ext.sync_service.protocol import wire
from megatron_ext.sync_service.protocol.frames import whole_box
from megatron_ext.sync_service.protocol.round_digest import RoundDigest

SHAPES = {
    "embedding": (40, 16),
    "layer.0.weight": (24, 16),
    "layer.0.bias": (24,),
    "layer.1.weight": (24, 700),
    "scale": (),
}


def start_values(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Return a peer's values before it knows the others."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def trained(values: dict[str, torch.Tensor], index: int, number: int) -> dict[str, torch.Tensor]:
    """Return values after an interval of a peer."""
    generator = torch.Generator().manual_seed(1000 * number + index)
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in values.items()}


def digest(values: dict[str, torch.Tensor]) -> str:
    """Return the digest that the server has of the same values."""
    total = RoundDigest()
    for name, value in values.items():
        total.add(name, tuple(value.shape), whole_box(tuple(value.shape)), value)
    return total.hex()


def run_peer(job: dict[str, Any]) -> int:
    """Run a peer.

    Args:
        job: `server`, `run`, `name`, `rounds` (train until this one), `report` (a file: gets a line of JSON per round)
            and, if wanted: `codec`, `seed`, `options` of ClientConfig, `pauses` (seconds before the upload of a round),
            `die` ([round, "before_upload" | "during_upload" | "after_upload"]), `leave`, `values` (tensor by round that
            is set to a number).
    """
    connection = ConnectionConfig(server=job["server"], patience_seconds=60, call_seconds=20)
    config = ClientConfig(
        connection=connection,
        run=job["run"],
        peer=job["name"],
        codec=job.get("codec", "fp32"),
        frame_bytes=4096,
        call_bytes=16384,
        round_seconds=60,
        heartbeat_seconds=0.3,  # a killed one does not count as alive for long
        **job.get("options", {}),
    )
    values = start_values(job.get("seed", hash(job["name"]) % 1000))
    with SyncClient(config, values) as client:
        try:
            values = client.start(values)
            _report(
                job,
                client,
                RoundOutcome(
                    number=client.round,
                    values=values,
                    contributed=False,
                    contributors=(),
                    message="",
                    excluded={},
                    sent=0,
                    received=0,
                ),
            )
            while client.round < job["rounds"]:
                values = _interval(client, values, job)
            if job.get("leave"):
                client.leave()
        except UserError as error:
            print(f"peer {job['name']}: {error}", flush=True)
            return 2
    return 0


def _interval(client: SyncClient, values: dict[str, torch.Tensor], job: dict[str, Any]) -> dict[str, torch.Tensor]:
    number = client.round + 1
    values = trained(values, client.index, number)
    for tensor, content in job.get("values", {}).get(str(number), {}).items():
        values[tensor].fill_(float(content))
    time.sleep(job.get("pauses", {}).get(str(number), 0))
    dying_round, place = job.get("die", [-1, ""])
    if dying_round == number:
        _die(client, number, values, place)
    outcome = client.sync(values, Report(loss=4.0 / (1 + number) + client.index / 10, steps=10))
    _report(job, client, outcome)
    return outcome.values


def _die(client: SyncClient, number: int, values: dict[str, torch.Tensor], place: str) -> None:
    if place == "during_upload":
        (first, *_) = client._outgoing.jobs(number, client.index, 16384)
        client._outgoing.begin(number, client.index)
        (frames, *_) = client._outgoing.batches(number, first, values)
        request = wire.Upload(caller=client._membership.caller, round=number, frames=frames)
        client._connection.call("Upload", lambda: iter([request]))
    elif place == "after_upload":
        client.upload(number, values)
    os.kill(os.getpid(), signal.SIGKILL)


def _report(job: dict[str, Any], client: SyncClient, outcome: RoundOutcome) -> None:
    line = {
        "round": outcome.number,
        "digest": digest(outcome.values),
        "index": client.index,
        "contributed": outcome.contributed,
        "contributors": outcome.contributors,
        "message": outcome.message,
        "excluded": outcome.excluded,
        "traffic": [outcome.sent, outcome.received],
        "shown": {name: value.view(-1)[0].item() for name, value in outcome.values.items()},
    }
    with Path(job["report"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
