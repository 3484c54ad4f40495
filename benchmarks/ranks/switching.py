# SPDX-License-Identifier: Apache-2.0
"""Switches between strategies on every rank, by turns with bare exchanges, copies, and megatron-core's resharding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "RANKS",
    "SWITCHES",
    "Setting",
    "executor_of",
    "held",
    "measure_by_turns",
    "rank_seconds",
    "require_equal",
    "start",
]

RANKS = 4
# DP, TP, PP before and after.
SWITCHES = {"dp_to_tp": ((2, 1, 2), (1, 4, 1)), "tp_to_dp": ((1, 4, 1), (4, 1, 1)), "no_move": ((4, 1, 1), (2, 1, 2))}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is switched, and how often it is measured."""

    layers: int
    """Layers of the model, divisible by 2."""

    hidden: int
    """Hidden size."""

    vocab: int
    """Rows of the embedding and of the output layer."""

    pairs: int
    """Measured pairs."""

    warmup: int
    """Pairs before those, not counted."""

    direct_bytes: int | None = None
    """From which size on a part travels on its own; None for the executor's default."""

    chunk_bytes: int | None = None
    """Largest message that is copied; None for the executor's default."""

    def shape(self) -> Any:
        """Return the model: a GPT as LLaMA has it, in bf16."""
        import torch

        from megatron_ext.params import GptShape

        return GptShape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            ffn_hidden_size=self.hidden * 11 // 4,
            num_attention_heads=8,
            padded_vocab_size=self.vocab,
            gated_linear_unit=True,
            add_bias_linear=False,
            normalization="RMSNorm",
            dtype=torch.bfloat16,
        )


def rank_seconds(name: str, setting: Setting) -> tuple[dict[str, list[float]], int]:
    """Run on one rank: return the seconds of each side, pair by pair, and the bytes that the rank receives."""
    import torch.distributed as dist

    from benchmarks.mcore_resharding import resharding
    from megatron_ext.hot_switch import plan_switch
    from megatron_ext.params import Layout

    start()
    group, rank = dist.group.WORLD, dist.get_rank()
    source, target = (Layout(dp=dp, tp=tp, pp=pp) for dp, tp, pp in SWITCHES[name])
    shape = setting.shape()
    plan = plan_switch(shape, source, target)
    executor = executor_of(setting, source, target)
    tensors = held(shape, source, rank)
    received = {peer: sum(move.nbytes for move in moves) for peer, moves in plan.receives(rank).items()}
    sent = {peer: sum(move.nbytes for move in moves) for peer, moves in plan.sends(rank).items()}
    sides: dict[str, Callable[[], object]] = {"switch": lambda: executor.switch(tensors)}
    if name != "no_move":
        sides["bare"] = _bare_exchange(received, sent, group)
        sides["copies"] = _copies(held(shape, target, rank), tensors, sum(received.values()))
        sides["mcore"], theirs = resharding(shape, source, target, rank, tensors)
    seconds = measure_by_turns(sides, pairs=setting.pairs, warmup=setting.warmup)
    expected = held(shape, target, rank)
    require_equal(executor.switch(tensors), expected)
    if name != "no_move":
        require_equal(theirs, expected)
    return seconds, sum(received.values())


def start() -> None:
    """Make this process a rank of the group."""
    import torch
    import torch.distributed as dist

    from megatron_ext.backends.cpu import CpuBackend
    from megatron_ext.patching import PatchRegistry

    torch.set_num_threads(1)
    CpuBackend().activate(PatchRegistry())  # megatron-core's sides ask for CUDA streams
    dist.init_process_group("gloo")


def executor_of(setting: Setting, source: Any, target: Any) -> Any:
    """Return what switches between two layouts in this process."""
    import torch.distributed as dist

    from megatron_ext.hot_switch import SwitchExecutor, plan_switch

    return SwitchExecutor(plan_switch(setting.shape(), source, target), dist.group.WORLD, sizes=_sizes(setting))


def measure_by_turns(sides: dict[str, Callable[[], object]], *, pairs: int, warmup: int) -> dict[str, list[float]]:
    """Return the seconds of each side on this rank, without the warm-up.

    The order turns round with every pair, so that what drifts touches all sides alike.
    """
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(warmup + pairs):
        for side in list(sides) if pair % 2 == 0 else reversed(list(sides)):
            dist.barrier()
            begin = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - begin)
    return {side: values[warmup:] for side, values in seconds.items()}


def _sizes(setting: Setting) -> Any:
    from megatron_ext.hot_switch.transfer.messages import DEFAULT_SIZES, MessageSizes

    default = DEFAULT_SIZES["gloo"]
    direct, chunk = setting.direct_bytes, setting.chunk_bytes
    return MessageSizes(
        direct_bytes=default.direct_bytes if direct is None else direct,
        chunk_bytes=default.chunk_bytes if chunk is None else chunk,
    )


def held(shape: Any, layout: Any, rank: int) -> dict[str, Any]:
    """Return what a rank of a layout holds of made-up values."""
    from megatron_ext.params import Placement, scatter
    from tests.params.models import full_values

    placement = Placement(shape, layout)
    return scatter(full_values(placement.tensors), placement.on_rank(rank))


def _bare_exchange(received: dict[int, int], sent: dict[int, int], group: Any) -> Callable[[], None]:
    import torch
    import torch.distributed as dist

    operations = []
    for kind, sizes in ((dist.irecv, received), (dist.isend, sent)):
        buffer = torch.ones(sum(sizes.values()), dtype=torch.uint8)
        pieces = buffer.split(list(sizes.values()))
        operations += [
            dist.P2POp(kind, piece, group=group, group_peer=peer) for peer, piece in zip(sizes, pieces, strict=True)
        ]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange


def _copies(target: dict[str, Any], source: dict[str, Any], received: int) -> Callable[[], object]:
    """Return what copies as many bytes as stay on a rank in tensors that have another shape then."""
    import torch

    changed = [tensor for name, tensor in target.items() if name not in source or source[name].shape != tensor.shape]
    stay = torch.ones(sum(tensor.nbytes for tensor in changed) - received, dtype=torch.uint8)
    moved = torch.empty_like(stay)
    return lambda: moved.copy_(stay)


def require_equal(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a measurement that did not switch."""
    import torch

    wrong = [name for name, value in expected.items() if name not in ours or not torch.equal(ours[name], value)]
    if wrong or len(ours) != len(expected):
        raise RuntimeError(f"not what the target layout holds: {', '.join(wrong)}")
