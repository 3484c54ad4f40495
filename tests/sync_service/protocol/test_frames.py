# SPDX-License-Identifier: Apache-2.0
"""Frames: what arrives is what was sent, and everything else is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.protocol import frames as frames_module
from megatron_ext.sync_service.protocol.catalog import TensorSpec
from megatron_ext.sync_service.protocol.frames import MAX_PAYLOAD, Box, Frame, codec_of, cut, step_of, whole_box
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.values.coverage import Coverage

SHAPE = (6, 50)
VALUES = torch.linspace(-3, 4, 300)


def frame(offset: int = 0, count: int = 300, box: Box | None = None, codec: str = "fp32") -> Frame:
    return Frame.make("w", SHAPE, box or whole_box(SHAPE), offset, VALUES[offset : offset + count], codec)


@pytest.mark.parametrize("codec", CODECS.own_names)
def test_a_frame_arrives_as_it_was_sent(codec: str):
    sent = frame(codec=codec)
    received = Frame.from_bytes(sent.to_message().SerializeToString())
    assert received == sent
    memory = torch.ones(300)
    received.decode_into(memory)
    assert torch.equal(memory, received.values())
    error = float((received.values() - VALUES).abs().max())
    close = {"fp32": 0.0, "bf16": 0.02, "fp16": 0.002, "fp8": 0.2, "int8": 0.03, "int4": 0.4}
    largest = {**close, "topk": 4.0, "topk2": 4.0}[codec]
    assert error <= largest and (error > 0) == (codec != "fp32")


@pytest.mark.parametrize("codec", CODECS.own_names)
def test_what_is_zero_is_not_coded_and_arrives_with_the_same_bits(codec: str):
    zeros = torch.zeros(40)
    sent = Frame.make("w", SHAPE, whole_box(SHAPE), 0, zeros, codec)
    assert sent.payload == b""
    received = Frame.from_bytes(sent.to_message().SerializeToString())
    whole = Frame.of_payload(
        "w", SHAPE, whole_box(SHAPE), 0, 40, codec, codec_of(codec).encode(zeros).numpy().tobytes()
    )
    memory = torch.ones(40)
    received.decode_into(memory)
    steps = step_of(received.values(), codec), step_of(whole.values(), codec)
    for mine, its in ((received.values(), whole.values()), steps, (memory, whole.values())):
        assert torch.equal(mine.view(torch.int32), its.view(torch.int32))


def test_a_negative_zero_stays_one():
    zeros = torch.zeros(40)
    zeros[7] = -0.0
    received = Frame.make("w", SHAPE, whole_box(SHAPE), 0, zeros).values()
    assert torch.equal(received.view(torch.int32), zeros.view(torch.int32))


@given(st.data())
def test_a_frame_with_any_bit_changed_is_refused(data: st.DataObject):
    message = frame(count=40).to_message().SerializeToString()
    position = data.draw(st.integers(0, 8 * len(message) - 1))
    changed = bytearray(message)
    changed[position // 8] ^= 1 << position % 8
    try:
        received = Frame.from_bytes(bytes(changed))
    except Refusal:
        return
    # Protobuf has several spellings of one message; what it says must be the same.
    assert received == frame(count=40)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused(data: bytes):
    with pytest.raises(Refusal):
        Frame.from_bytes(data)


NUMBERS = st.one_of(st.integers(0, 60), st.sampled_from([2**31, 2**63, 2**64 - 1]))
AXES = st.lists(NUMBERS, max_size=4)


@given(
    shape=AXES,
    start=AXES,
    size=AXES,
    offset=NUMBERS,
    count=NUMBERS,
    payload=st.binary(max_size=64),
    codec=st.sampled_from([*CODECS.own_names, "", "other", "topk:0.5", "topk:0", "topk:nan", "topk:x", "fp32:1"]),
)
def test_a_frame_that_checks_out_fits_its_tensor(
    shape: list, start: list, size: list, offset: int, count: int, payload: bytes, codec: str
):
    """Frames with right checksums and any content: what passes the checks can be put where it belongs."""
    unchecked = Frame(
        name="w",
        shape=tuple(shape),
        box=Box(tuple(start), tuple(size)),
        offset=offset,
        count=count,
        codec=codec,
        payload=payload,
        checksum=0,
    )
    content = {key: value for key, value in vars(unchecked).items() if key != "checksum"}
    message = Frame(**content, checksum=frames_module._checksum(**content)).to_message().SerializeToString()
    try:
        received = Frame.from_bytes(message)
    except Refusal as refusal:
        assert refusal.reason == "invalid"
        return
    assert received.values().numel() == received.count <= received.box.numel
    assert all(a + n <= total for a, n, total in zip(start, size, shape, strict=True))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"offset": 270}, "leaves its box of 300 elements"),
        ({"count": 0}, "leaves its box"),
        ({"box": Box((0,), (300,))}, "box does not fit the shape"),
        ({"box": Box((1, 0), (6, 50))}, "box leaves the shape"),
        ({"box": Box((0, 0), (6, 0))}, "box leaves the shape"),
        ({"count": 39}, "which its codec contradicts"),
        ({"codec": "other"}, "codec 'other' is not known"),
        ({"codec": "topk:0"}, "the density of codec 'topk:0' must be above 0 and at most 1"),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused_though_its_checksum_is_right(change: dict, problem: str):
    good = frame(count=40)
    content = {**{key: value for key, value in vars(good).items() if key != "checksum"}, **change}
    with pytest.raises(Refusal, match=problem):
        Frame(**content, checksum=frames_module._checksum(**content)).check()


def test_a_frame_that_is_too_large_is_refused():
    count = MAX_PAYLOAD // 4 + 1
    too_large = Frame.make("w", (count,), whole_box((count,)), 0, torch.zeros(count))
    with pytest.raises(Refusal, match="at most 4194304 are possible"):
        too_large.check()


def test_a_frame_of_another_shape_is_refused_by_name():
    with pytest.raises(Refusal, match=r"shape of tensor 'w' is \(6, 50\) instead of \(50, 6\)"):
        frame().check_against(TensorSpec(name="w", shape=(50, 6)))


@given(numel=st.integers(1, 5000), frame_bytes=st.sampled_from([4096, 5000, 8192]))
def test_cutting_covers_everything_once_and_wastes_no_scale(numel: int, frame_bytes: int):
    parts = list(cut(numel, frame_bytes))
    assert [offset for offset, _ in parts] == [sum(count for _, count in parts[:index]) for index in range(len(parts))]
    assert sum(count for _, count in parts) == numel
    assert all(count % 128 == 0 and 4 * count <= frame_bytes for _, count in parts[:-1])


def test_what_overlaps_is_refused_and_what_does_not_counts():
    coverage = Coverage()
    left, right = Box((0, 0), (6, 20)), Box((0, 20), (6, 30))
    for part in (frame(0, 60, left), frame(60, 60, left), frame(90, 90, right), frame(0, 90, right)):
        coverage.check(part)
        coverage.add(part)
    assert coverage.covered == 300
    for part in (frame(0, 10, Box((0, 19), (6, 2))), frame(59, 2, left), frame(0, 120, left), frame(119, 1, left)):
        with pytest.raises(Refusal, match="overlaps"):
            coverage.check(part)


@given(st.data())
def test_any_tiling_in_any_order_is_covered_exactly_once(data: st.DataObject):
    rows = data.draw(st.integers(1, 6))
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, 49), max_size=4))), 50]
    boxes = [
        Box((row, left), (min(rows, 6 - row), right - left))
        for row in range(0, 6, rows)
        for left, right in pairwise(edges)
    ]
    parts = [(box, offset, count) for box in boxes for offset, count in cut(box.numel, 512)]
    coverage = Coverage()
    for box, offset, count in data.draw(st.permutations(parts)):
        part = Frame.make("w", SHAPE, box, offset, torch.zeros(count))
        part.check()
        coverage.check(part)
        coverage.add(part)
        with pytest.raises(Refusal):
            coverage.check(part)
    assert coverage.covered == 300


def test_the_message_has_no_room_for_code():
    """Nothing is unpickled: a frame is names, numbers and raw bytes."""
    kinds = {field.name for field in pb2.Frame.DESCRIPTOR.fields}
    assert kinds == {"name", "shape", "box_start", "box_shape", "offset", "count", "codec", "payload", "checksum"}
