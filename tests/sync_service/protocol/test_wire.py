# SPDX-License-Identifier: Apache-2.0
"""Messages with frames are, byte for byte, what protobuf makes of sync.proto, and are read without copying payloads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.wire import (
    Batch,
    Unreadable,
    Upload,
    pack,
    readable,
    unpack_batch,
    unpack_upload,
)

CALLER = pb2.Caller(run="demo", peer="p0", instance="process")


def frames_of(*counts: int, codec: str = "fp32") -> list[Frame]:
    shape = (7, 100)
    return [
        Frame.make("w", shape, whole_box(shape), 3 * at, torch.arange(1.0, count + 1), codec)
        for at, count in enumerate(counts)
    ]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("counts", [(), (1,), (31, 32, 33), (640,)])
def test_protobuf_reads_what_is_packed_and_packs_what_is_read(counts: tuple[int, ...], codec: str):
    sent = frames_of(*counts, codec=codec)
    upload = pb2.UploadRequest.FromString(pack(Upload(caller=CALLER, round=1 << 40, frames=sent)))
    assert upload == pb2.UploadRequest(caller=CALLER, round=1 << 40, frames=[frame.to_message() for frame in sent])
    found = unpack_upload(upload.SerializeToString())
    assert isinstance(found, Upload) and (found.caller, found.round) == (CALLER, 1 << 40)
    assert [frame.to_message() for frame in found.frames] == list(upload.frames)

    batch = pb2.FrameBatch.FromString(pack(Batch(frames=sent, unchanged=[2, 300], source=b"who")))
    assert batch == pb2.FrameBatch(frames=[f.to_message() for f in sent], unchanged=[2, 300], source=b"who")
    taken = unpack_batch(batch.SerializeToString())
    assert isinstance(taken, Batch) and (list(taken.unchanged), taken.source) == ([2, 300], b"who")
    for frame in taken.frames:
        frame.check()


def test_a_payload_is_not_copied_when_received():
    data = pack(Batch(frames=frames_of(640)))
    found = unpack_batch(data)
    assert isinstance(found, Batch)
    payload = found.frames[0].payload
    assert isinstance(payload, memoryview) and payload.obj is data


@given(st.data())
def test_bytes_that_are_no_message_are_named_and_never_raise(data: st.DataObject):
    good = pack(Upload(caller=CALLER, round=3, frames=frames_of(5, 6)))
    cut = data.draw(st.integers(0, len(good)))
    bad = bytearray(good[:cut] + data.draw(st.binary(max_size=8)))
    for _ in range(data.draw(st.integers(0, 3)) if bad else 0):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    for unpack in (unpack_upload, unpack_batch):
        assert isinstance(unpack(bytes(bad)), Upload | Batch | Unreadable)


@pytest.mark.parametrize("bad", [b"\x0b", b"\x18", b"\x18" + b"\xff" * 10, b"\x1a\x05ab", b"\x18\x01", b"\x0a\x01\xff"])
def test_a_stream_with_an_unreadable_message_is_refused(bad: bytes):
    found = unpack_upload(bad)
    assert isinstance(found, Unreadable)
    with pytest.raises(Refusal, match="an upload's message cannot be read"):
        list(readable([found]))
