# SPDX-License-Identifier: Apache-2.0
"""What the ranks of executor tests do, and the models and layouts that they switch between."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.hot_switch import plan_switch
from megatron_ext.hot_switch.transfer.executor import SwitchExecutor
from megatron_ext.hot_switch.transfer.messages import MessageSizes
from megatron_ext.params import GptShape, Layout, Placement, scatter
from tests.params.models import full_values

Tensors = dict[str, torch.Tensor]

DENSE = GptShape(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=8,
    num_query_groups=4,
    padded_vocab_size=64,
    gated_linear_unit=True,
    add_bias_linear=False,
    normalization="RMSNorm",
)
TIED = replace(
    DENSE,
    share_embeddings_and_output_weights=True,
    gated_linear_unit=False,
    add_bias_linear=True,
    max_sequence_length=6,
)
EXPERTS = replace(DENSE, num_moe_experts=4, moe_ffn_hidden_size=16, moe_router_enable_expert_bias=True)

Chain = tuple[GptShape, tuple[Layout, ...]]

CHAINS: dict[str, Chain] = {
    "tp, pp and dp": (DENSE, (Layout(tp=4), Layout(dp=4), Layout(dp=2, tp=2), Layout(dp=2, pp=2), Layout(pp=4))),
    "interleaved": (DENSE, (Layout(pp=2, vpp=2, dp=2), Layout(tp=4), Layout(tp=2, pp=2, vpp=2), Layout(dp=4))),
    "tied": (TIED, (Layout(pp=2, tp=2), Layout(dp=4), Layout(pp=4), Layout(tp=2, dp=2))),
    "experts": (
        EXPERTS,
        (Layout(dp=4, ep=4, etp=1), Layout(tp=2, dp=2, ep=2, etp=2), Layout(tp=4, ep=2, etp=2), Layout(pp=2, dp=2)),
    ),
}
"""Models and the layouts that they go through, home first, all on 4 ranks."""

EIGHT: dict[str, Chain] = {
    "eight ranks": (EXPERTS, (Layout(tp=4, pp=2), Layout(dp=8, ep=4, etp=1), Layout(tp=2, pp=2, dp=2)))
}
"""The same on 8 ranks."""

SIZES = {
    "default": None,
    "all direct": MessageSizes(direct_bytes=0, chunk_bytes=1 << 20),
    "all packed": MessageSizes(direct_bytes=1 << 40, chunk_bytes=1 << 20),
    "mixed, many rounds": MessageSizes(direct_bytes=300, chunk_bytes=200),
}


def start(seconds: float = 60) -> Any:
    """Start torch.distributed; return the group of all ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    return dist.group.WORLD


def held(shape: GptShape, layout: Layout, factor: float = 1.0) -> Tensors:
    """Return what this rank holds under a layout of made-up values times `factor`."""
    placement = Placement(shape, layout)
    values = {name: value * factor for name, value in full_values(placement.tensors).items()}
    return scatter(values, placement.on_rank(dist.get_rank()))


def differences(ours: Tensors, expected: Tensors) -> list[str]:
    """Return the names of what is missing, or not equal to the last bit."""
    return [
        name
        for name in sorted(ours.keys() | expected.keys())
        if name not in ours
        or name not in expected
        or ours[name].dtype != expected[name].dtype
        or ours[name].shape != expected[name].shape
        or not torch.equal(ours[name].view(torch.uint8), expected[name].view(torch.uint8))
    ]


def go_rounds(chains: dict[str, Chain], sizes_name: str, dtype: torch.dtype) -> list[str]:
    """Switch through chains and back home, then with other values, then from other memory; return what was wrong."""
    group = start()
    return [
        f"{name}: {wrong}"
        for name, (shape, layouts) in chains.items()
        for wrong in _go_round(group, replace(shape, dtype=dtype), layouts, SIZES[sizes_name])
    ]


def _go_round(group: Any, shape: GptShape, layouts: tuple[Layout, ...], sizes: MessageSizes | None) -> list[str]:
    hops = list(zip(layouts, (*layouts[1:], layouts[0]), strict=True))
    executors = [SwitchExecutor(plan_switch(shape, *hop), group, sizes=sizes) for hop in hops]
    wrong = []
    home = held(shape, layouts[0])
    places: list[dict[str, int]] = []
    for factor in (1.0, -2.0, 3.0):
        if factor == 3.0:
            kept = home  # so that the new tensors cannot lie in the memory of the old ones
            home = {name: torch.zeros_like(tensor) for name, tensor in kept.items()}
        for name, tensor in held(shape, layouts[0], factor).items():
            home[name].copy_(tensor)
        tensors = home
        for number, ((_, target), executor) in enumerate(zip(hops, executors, strict=True)):
            tensors = executor.switch(tensors)
            wrong += [f"{target}: {each}" for each in differences(tensors, held(shape, target, factor))]
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            if factor == 1.0:
                places.append(addresses)
            elif factor == -2.0 and addresses != places[number]:
                wrong.append(f"{target}: not in the memory of the first time")
        wrong += [f"home changed: {each}" for each in differences(home, held(shape, layouts[0], factor))]
    return wrong


def counted_bytes(sizes_name: str) -> list[tuple[int, int]]:
    """Return for every switch of all chains the bytes that this rank gave to sends, and those of the plan."""
    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    group = start()
    meter = TrafficMeter(worker_of=range(dist.get_world_size()))
    registry = PatchRegistry()
    registry.apply(meter.patches())
    counts = []
    for shape, layouts in CHAINS.values():
        for source, target in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
            plan = plan_switch(shape, source, target)
            executor = SwitchExecutor(plan, group, sizes=SIZES[sizes_name])
            meter.reset()
            executor.switch(held(shape, source))
            sent = meter.crossing["isend"].bytes if "isend" in meter.crossing else 0
            planned = sum(move.nbytes for moves in plan.sends(dist.get_rank()).values() for move in moves)
            counts.append((sent, planned))
    registry.revert()
    return counts


def shared_memory() -> dict[str, Any]:
    """Switch without moving anything; return the problems of the results' memory, and what was sent."""
    from megatron_ext.patching import PatchRegistry
    from megatron_ext.transport.traffic import TrafficMeter

    group = start()
    source, target = Layout(dp=4), Layout(dp=2, pp=2)
    executor = SwitchExecutor(plan_switch(DENSE, source, target), group)
    home = held(DENSE, source)
    executor.switch(home)  # the ranks meet once
    meter = TrafficMeter(worker_of=range(dist.get_world_size()))
    registry = PatchRegistry()
    registry.apply(meter.patches())
    guest = executor.switch(home)
    registry.revert()
    cut = SwitchExecutor(plan_switch(DENSE, source, Layout(tp=4)), group).switch(home)
    first = home["embedding.word_embeddings.weight"].untyped_storage().data_ptr()
    return {
        "apart": [name for name, tensor in guest.items() if tensor.data_ptr() != home[name].data_ptr()],
        "wrong": differences(guest, held(DENSE, target)),
        "sent": meter.crossing_calls,
        "embedding_offset": cut["embedding.word_embeddings.weight"].data_ptr() - first,
        "copied": sorted(
            {
                name.split(".", 3)[-1]
                for name, tensor in cut.items()
                if tensor.untyped_storage().data_ptr() != home[name].untyped_storage().data_ptr()
            }
        ),
        "allocations": len({tensor.untyped_storage().data_ptr() for name, tensor in cut.items() if "fc" in name}),
    }


def released() -> list[str]:
    """Switch, give all memory up, switch again with other values; return the problems."""
    group = start()
    source, target = Layout(tp=4), Layout(dp=4)
    executor = SwitchExecutor(plan_switch(DENSE, source, target), group)
    home = held(DENSE, source)
    first = executor.switch(home)
    storage = first["embedding.word_embeddings.weight"].untyped_storage()
    executor.release()
    wrong = [] if storage.nbytes() == 0 else ["the memory is still there"]
    for name, tensor in held(DENSE, source, 3.0).items():
        home[name].copy_(tensor)
    again = executor.switch(home)
    executor.settle()
    if any(staging.untyped_storage().nbytes() for staging in executor._staging):
        wrong.append("the memory of messages is still there")
    wrong += differences(again, held(DENSE, target, 3.0))
    for name, tensor in held(DENSE, source, 5.0).items():
        home[name].copy_(tensor)
    wrong += differences(executor.switch(home), held(DENSE, target, 5.0))
    # Who kept the results, such as a model, finds the new values in them.
    return wrong + differences(first, again)


def units_in_their_order() -> list[str]:
    """Ask for units one after the other, each when those before it are there; return what was wrong."""
    group = start()
    wrong = []
    sizes = MessageSizes(direct_bytes=300, chunk_bytes=200, round_bytes=600)
    for source, target in [(Layout(tp=4), Layout(dp=4)), (Layout(dp=2, tp=2), Layout(tp=4))]:
        placement = Placement(DENSE, target)
        names = {unit: [t.name for t in placement.tensors if t.unit == unit] for unit in placement.units}
        executor = SwitchExecutor(plan_switch(DENSE, source, target), group, sizes=sizes)
        for factor in (1.0, 2.0):
            expected = held(DENSE, target, factor)
            results, arriving = executor.begin(held(DENSE, source, factor))
            for unit, of_unit in names.items():
                if arriving.complete and unit.startswith("layer"):
                    wrong.append(f"{target}: all had arrived before {unit}")
                arriving.require([unit])
                own = {name: results[name] for name in of_unit if name in results}
                wrong += differences(own, {name: expected[name] for name in own})
                # Ranks that compute together wait for each other here.
                dist.barrier(group)
            arriving.finish()
            wrong += differences(results, expected) + ([] if arriving.complete else [f"{target}: not all arrived"])
    return wrong


def into_given_tensors() -> list[str]:
    """Switch from a guest whose tensors are partly home's own memory back into home's; return the problems."""
    group = start()
    wrong = []
    for home_layout, guest_layout in [(Layout(dp=4), Layout(tp=4)), (Layout(dp=2, pp=2), Layout(tp=4))]:
        home = held(DENSE, home_layout)
        there = SwitchExecutor(plan_switch(DENSE, home_layout, guest_layout), group)
        back = SwitchExecutor(plan_switch(DENSE, guest_layout, home_layout), group)
        for factor in (2.0, 3.0):
            guest = there.switch(home)
            for name, tensor in held(DENSE, guest_layout, factor).items():
                guest[name].copy_(tensor)
            results = back.switch(guest, out=home)
            wrong += differences(home, held(DENSE, home_layout, factor))
            wrong += [name for name, tensor in results.items() if tensor.data_ptr() != home[name].data_ptr()]
    return wrong


def added_gradients(sizes_name: str) -> list[str]:
    """Send a guest's gradients home twice; return which of home's are not the sum of what was there and came."""
    group = start()
    wrong = []
    for source, target in [(Layout(dp=4), Layout(tp=4)), (Layout(tp=4), Layout(dp=2, pp=2)), (Layout(dp=4),) * 2]:
        shape = replace(EXPERTS, dtype=torch.bfloat16)
        plan = plan_switch(shape, source, target)
        executor = SwitchExecutor(plan, group, sizes=SIZES[sizes_name], gradients=True)
        in_fp32 = replace(shape, dtype=torch.float32)
        guest, home, expected = (_gradients(in_fp32, *of) for of in ((source, 2.0), (target, 1.0), (target, 5.0)))
        for _ in range(2):
            executor.switch(guest, out=home)
        wrong += differences(home, expected)
    return wrong


def gradients_through_guests() -> list[str]:
    """Pass gradients on from guest to guest and home, where nothing is yet; return which have other bits."""
    group = start()
    shape = replace(DENSE, dtype=torch.bfloat16)
    in_fp32 = replace(shape, dtype=torch.float32)
    layouts = (Layout(dp=4), Layout(tp=4), Layout(dp=2, pp=2), Layout(tp=2, pp=2))
    gradients = held(in_fp32, layouts[0])
    for source, target in pairwise(layouts):
        sums = {name: torch.zeros_like(tensor) for name, tensor in held(in_fp32, target).items()}
        SwitchExecutor(plan_switch(shape, source, target), group, gradients=True).switch(gradients, out=sums)
        gradients = sums
    return differences(gradients, held(in_fp32, layouts[-1]))


def _gradients(shape: GptShape, layout: Layout, factor: float) -> Tensors:
    """Small whole numbers, which fp32 adds without an error, for every parameter."""
    return {
        name: tensor.mul(100).round_().mul_(factor)
        for name, tensor in held(shape, layout).items()
        if "expert_bias" not in name
    }


def refused(case: str) -> None:
    """Ask for a switch that cannot be; the same on all ranks."""
    group = start(seconds=10)
    source, target = Layout(tp=2), Layout(dp=2)
    tensors = held(DENSE, source)
    executor = SwitchExecutor(plan_switch(DENSE, source, target), group)
    embedding, norm = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
    if case == "several":
        del tensors[norm]
        tensors[embedding] = tensors[embedding].bfloat16()
        tensors["output_layer.weight"] = tensors["output_layer.weight"].t()
    if case == "gaps":
        tensors[embedding] = tensors[embedding].t().contiguous().t()
    if case == "out":
        executor.switch(tensors, out={name: tensor for name, tensor in held(DENSE, target).items() if name != norm})
    if case == "overlap":
        # Each rank's half lies where the other one's half is to arrive.
        whole = held(DENSE, target)
        tensors[embedding] = whole[embedding].chunk(2)[1 - dist.get_rank()]
        executor.switch(tensors, out=whole)
    if case == "sizes":
        sizes = MessageSizes(direct_bytes=dist.get_rank(), chunk_bytes=64)
        executor = SwitchExecutor(plan_switch(DENSE, source, target), group, sizes=sizes)
    if case == "gradients":
        executor = SwitchExecutor(plan_switch(DENSE, source, target), group, gradients=True)
    if case == "own gradients":
        executor = SwitchExecutor(plan_switch(DENSE, source, source), group, gradients=True)
        executor.switch(tensors, out=tensors)
    if case == "group":
        SwitchExecutor(plan_switch(DENSE, Layout(tp=4), Layout(dp=4)), group)
    executor.switch(tensors)


def with_a_lost_peer(how: str) -> None:
    """Switch with rank 1 gone, or there without taking part."""
    import os
    import time

    group = start(seconds=2)
    executor = SwitchExecutor(plan_switch(DENSE, Layout(tp=2), Layout(dp=2)), group)
    tensors = held(DENSE, Layout(tp=2))
    executor.switch(tensors)
    if dist.get_rank() == 1:
        if how == "dead":
            os._exit(1)
        time.sleep(30)
    executor.switch(tensors)
