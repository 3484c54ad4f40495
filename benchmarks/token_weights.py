# SPDX-License-Identifier: Apache-2.0
"""Peers of unequal batches whose contributions count by their tokens, against peers that all count alike.

    python -m benchmarks.token_weights [--seeds 1 2 3 4 5] [--json FILE]

Peers with batches of 8, 32 and 128 samples train a small network on characters of Python's standard library, each on a
part of its own, and meet at a real server after every 20 steps. Beside them is one job that trains on all of their
samples in every step. All begin with the same weights, and are validated on text that nobody trains on.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.command_line import add_report_option, add_seeds_option, at_least, benchmark_parser
from benchmarks.common import Case, print_table, report
from benchmarks.server_process import server_of
from megatron_ext.cli.ending import ended_by_sigterm
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient
from megatron_ext.sync_service.protocol.report import Progress

BATCHES = (8, 32, 128)
"""Samples of a step of each peer."""

STEPS = 20
"""Between two rounds."""

CONTEXT, WIDTH = 8, 128

ALIKE, BY_TOKENS, ONE_JOB = "all count alike", "by tokens", "one job"

RUNS: Mapping[str, Mapping[str, object]] = {
    ALIKE: {"peers": len(BATCHES)},
    BY_TOKENS: {"peers": len(BATCHES), "token_weights": True},
}
"""The server's settings of each kind of run."""

_MODULES = (argparse, inspect, statistics, tempfile)


class Characters:
    """A network with one hidden layer that predicts a character from those before it."""

    def __init__(self, seed: int) -> None:
        """Draw its weights."""
        draws = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (128, 16), "hidden": (WIDTH, 16 * CONTEXT), "head": (128, WIDTH)}
        self.weights = {
            name: (torch.randn(shape, generator=draws) / shape[-1] ** 0.5).requires_grad_()
            for name, shape in shapes.items()
        }
        self._optimizer = torch.optim.Adam(self.weights.values(), lr=2e-3)

    def loss(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the characters that follow `CONTEXT` others.

        Args:
            text: characters, (characters,).
            starts: places at which the others begin, (samples,).
        """
        seen = text[starts[:, None] + torch.arange(CONTEXT)]
        hidden = torch.relu(self.weights["embedding"][seen].flatten(1) @ self.weights["hidden"].T)
        return torch.nn.functional.cross_entropy(hidden @ self.weights["head"].T, text[starts + CONTEXT])

    def step(self, text: torch.Tensor, starts: torch.Tensor) -> None:
        """Make a step of Adam's."""
        self._optimizer.zero_grad()
        self.loss(text, starts).backward()
        self._optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the weights as the service takes them."""
        return {name: value.detach().clone() for name, value in self.weights.items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take weights over."""
        with torch.no_grad():
            for name, value in self.weights.items():
                value.copy_(values[name])


class Samples:
    """What a peer draws from its part of the text."""

    def __init__(self, part: torch.Tensor, batch: int, seed: int) -> None:
        """Begin to draw."""
        self.text, self.batch = part, batch
        self._draws = torch.Generator().manual_seed(seed)

    def starts(self) -> torch.Tensor:
        """Return the places of a step's samples."""
        return torch.randint(len(self.text) - CONTEXT, (self.batch,), generator=self._draws)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with every seed, and report."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {ALIKE: [], BY_TOKENS: [], ONE_JOB: []}
    with ended_by_sigterm():
        for seed in options.seeds:
            for kind, settings in RUNS.items():
                losses[kind].append(of_peers(settings, options.rounds, seed))
            losses[ONE_JOB].append(of_one_job(options.rounds, seed))
    ratios = [ours / theirs for ours, theirs in zip(losses[BY_TOKENS], losses[ALIKE], strict=True)]
    batches = ", ".join(map(str, BATCHES))
    print(f"batches of {batches} samples, {options.rounds} rounds of {STEPS} steps, {len(options.seeds)} seeds\n")
    rows = [
        (kind, f"{statistics.fmean(found):.4f}", f"{min(found):.4f} - {max(found):.4f}")
        for kind, found in losses.items()
    ]
    print_table(("peers", "validation loss", "of the seeds"), rows)
    print(f"\nby tokens / alike, seed by seed: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    ratio = statistics.fmean(ratios)
    case = Case(case="by_tokens_over_alike_loss", value=ratio, unit="ratio", goal=1.0, direction="lower")
    report([case], options.json)
    return 0


def texts(seed: int) -> tuple[list[Samples], torch.Tensor]:
    """Return what each peer trains on, in parts of equal length, and the text of the validation."""
    source = "".join(inspect.getsource(module) for module in _MODULES)
    text = torch.tensor([min(ord(letter), 127) for letter in source])
    # Every 2,000 characters are divided equally among the peers and the validation, so that all parts are much alike.
    pieces = text[: len(text) // 2000 * 2000].view(-1, len(BATCHES) + 1, 2000 // (len(BATCHES) + 1))
    *parts, held_out = (pieces[:, place].flatten() for place in range(len(BATCHES) + 1))
    drawn = [
        Samples(part, batch, 1000 * seed + place)
        for place, (part, batch) in enumerate(zip(parts, BATCHES, strict=True))
    ]
    return drawn, held_out


def validated(model: Characters, held_out: torch.Tensor) -> float:
    """Return the loss of all characters that nobody trains on."""
    with torch.no_grad():
        return float(model.loss(held_out, torch.arange(len(held_out) - CONTEXT)))


def of_one_job(rounds: int, seed: int) -> float:
    """Return the validation loss of a job whose steps have the samples of all peers."""
    parts, held_out = texts(seed)
    whole = torch.cat([part.text for part in parts])
    begins = torch.tensor([0, *(len(part.text) for part in parts[:-1])]).cumsum(0).tolist()
    model = Characters(seed)
    for _ in range(rounds * STEPS):
        model.step(whole, torch.cat([begin + part.starts() for begin, part in zip(begins, parts, strict=True)]))
    return validated(model, held_out)


def of_peers(settings: Mapping[str, object], rounds: int, seed: int) -> float:
    """Return the validation loss of the weights that peers have in common after their last round."""
    parts, held_out = texts(seed)
    with (
        tempfile.TemporaryDirectory(prefix="token_weights.") as folder,
        server_of(Path(folder), {"run": settings}) as server,
        ThreadPoolExecutor(len(parts)) as peers,
    ):
        ends = [
            peers.submit(_take_part, server.address, place, part, rounds, seed) for place, part in enumerate(parts)
        ]
        models = [end.result() for end in ends]
    return validated(models[0], held_out)


def _take_part(address: str, place: int, part: Samples, rounds: int, seed: int) -> Characters:
    """Train one peer's part, and meet the others; return its model after the last round."""
    model = Characters(seed)
    config = ClientConfig(
        connection=ConnectionConfig(server=address),
        run="run",
        peer=f"peer-{place}",
        index=place,
        agreed={"steps": str(STEPS)},
    )
    with SyncClient(config, model.values()) as client:
        model.load(client.start(model.values()))
        while client.round < rounds:
            for _ in range(STEPS):
                model.step(part.text, part.starts())
            made = STEPS * (client.round + 1)
            progress = Progress(made, made * part.batch, float(made), part.batch)
            model.load(client.sync(model.values(), Report(steps=STEPS, progress=progress)).values)
        client.leave()
    return model


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("token_weights", __doc__)
    found.add_argument("--rounds", type=at_least(1, 10_000), default=20, help="of all peers (20)")
    add_seeds_option(found, "of weights and samples")
    add_report_option(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
