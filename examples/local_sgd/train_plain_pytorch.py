# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level transformer with local SGD and without Megatron.

    torchrun --nproc-per-node 2 examples/local_sgd/train_plain_pytorch.py             # DDP: every process is a worker
    torchrun --nproc-per-node 4 examples/local_sgd/train_plain_pytorch.py --shards 2  # FSDP2: workers of two processes

It runs on CPU with gloo, and with --backend nccl on GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_ext.errors import UserError, report
from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager, StatefulPostLocalSGDOptimizer

LENGTH = 64


class ByteModel(torch.nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, hidden: int = 64, layers: int = 2) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = torch.nn.Embedding(256, hidden)
        self.position = torch.nn.Embedding(LENGTH, hidden)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, 256), of the next byte after every byte of `tokens`, (batch, length)."""
        length = tokens.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print a line per round."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.text.is_file() or options.text.stat().st_size <= LENGTH + 1:
        parser.error(f"--text {options.text} is not a file of more than {LENGTH + 1} bytes; give a longer one")
    dist.init_process_group(options.backend)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % options.shards:
        raise SystemExit(f"--shards {options.shards} does not divide the number of processes {world}")

    torch.manual_seed(0)  # the same initial weights everywhere
    model = ByteModel().to(device)
    across = inside = None
    if options.shards > 1:
        shape = (world // options.shards, options.shards)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("worker", "shard"))
        across, inside = mesh["worker"].get_group(), mesh["shard"].get_group()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        warmup = 0  # gradients never leave a worker
    else:
        warmup = options.warmup
        model = torch.nn.parallel.DistributedDataParallel(model)
        # Gradients are synchronous for `warmup` iterations, and stay in the worker afterwards.
        state = PostLocalSGDState(None, None, start_localSGD_iter=warmup, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)

    averager = OuterOptimPeriodicModelAverager(
        across,
        local_sgd_config=LocalSGDConfig(
            local_sgd_sync_interval=options.interval, local_sgd_warmup_steps=warmup, skip_anomaly=True
        ),
        outer_optim_config=OuterOptimizerConfig(outer_optimizer_lr=0.7, outer_optimizer_momentum=0.6),
        shard_group=inside,
    )
    optimizer = StatefulPostLocalSGDOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), averager, model)

    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    samples = torch.Generator().manual_seed(1 + rank)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (options.batch,), generator=samples).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        before = optimizer.last_round
        optimizer.step()
        made = optimizer.last_round
        if made is not before and rank == 0:
            print(
                f"step {step:4}  round {made.round:3}  loss of worker 0 {loss.item():.3f}  pseudo-gradient norm "
                f"{made.pseudo_gradient_norm:.3f}  {made.bytes_sent / 1e6:.2f} MB sent",
                flush=True,
            )
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="inner steps (200)")
    parser.add_argument("--interval", type=int, default=20, help="steps between two rounds (20)")
    parser.add_argument("--warmup", type=int, default=20, help="synchronous steps at the start, with DDP (20)")
    parser.add_argument("--shards", type=int, default=1, help="processes of a worker, which share its parameters")
    parser.add_argument("--batch", type=int, default=16, help="samples of a process and step (16)")
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parents[2] / "README.md", help="to learn")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="of torch.distributed (gloo)")
    return parser


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        report(error)
        sys.exit(2)
