# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop as a peer of a sync service: processes that train apart and meet every few steps.

    megatron-ext server start --config configs/sync_server_toy.yaml
    python examples/sync_service/plain_peer.py --peer peer-0 & python examples/sync_service/plain_peer.py --peer peer-1

Start as many peers as the run has places, each under a name of its own. What makes the loop a peer is in `main`.
"""

import argparse
import sys

import torch

from megatron_ext.errors import UserError, report
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient, Values


def weights(model: torch.nn.Module) -> Values:
    """Return the weights as the service takes them: fp32, on the CPU, by name."""
    return {name: parameter.detach().float().cpu() for name, parameter in model.named_parameters()}


def load(model: torch.nn.Module, values: Values) -> None:
    """Give the model these weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, draws: torch.Generator, steps: int) -> float:
    """Make an interval's steps on this peer's own samples; return their mean loss."""
    total = 0.0
    for _ in range(steps):
        sample = torch.rand(64, 2, generator=draws) * 4 - 2
        loss = torch.nn.functional.mse_loss(model(sample), (sample[:, :1] * sample[:, 1:]).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def main() -> None:
    """Train, and meet the others after every interval."""
    parser = argparse.ArgumentParser(description="Train a small network as a peer of a sync service.")
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT of the server")
    parser.add_argument("--run", default="toy", help="name of the run there")
    parser.add_argument("--peer", required=True, help="name of this process among the peers")
    parser.add_argument("--rounds", type=int, default=10, help="after which round to end")
    parser.add_argument("--interval", type=int, default=50, help="steps between two rounds")
    args = parser.parse_args()

    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = ClientConfig(
        connection=ConnectionConfig(server=args.server),
        run=args.run,
        peer=args.peer,
        agreed={"interval": str(args.interval)},
    )
    with SyncClient(config, weights(model)) as client:
        load(model, client.start(weights(model)))  # all peers begin with the same weights
        draws = torch.Generator().manual_seed(client.index)
        while client.round < args.rounds:
            loss = train(model, optimizer, draws, args.interval)
            outcome = client.sync(weights(model), Report(loss=loss, steps=args.interval))
            load(model, outcome.values)
            print(f"round {client.round}: loss {loss:.4f}, weights {client.digest[:12]}", flush=True)
        client.leave()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        report(error)
        sys.exit(2)
