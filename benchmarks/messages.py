# SPDX-License-Identifier: Apache-2.0
"""Messages of values per second of processor time, packed and unpacked: protocol/wire.py against protobuf's classes.

python -m benchmarks.messages [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

import torch

from benchmarks.command_line import add_report_option, at_least, benchmark_parser, require_memory
from benchmarks.common import Case, print_table, report
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.wire import Upload, pack, readable, unpack_upload

FRAME_BYTES = 1 << 20
"""Of a message of an upload, as the sync service cuts them."""

SPEEDUP_GOAL = 2.0
"""Below that, protobuf's classes alone would do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both in turn and report."""
    options = parser().parse_args(arguments)
    require_memory(parser(), "--messages", 2 * FRAME_BYTES * options.messages)
    count = FRAME_BYTES // 4
    shape = (options.messages, count)
    values = torch.randn(count)
    frames = [Frame.make("w", shape, whole_box(shape), count * at, values) for at in range(options.messages)]
    rates: dict[str, list[float]] = {"wire": [], "protobuf": []}
    for _ in range(options.turns):
        rates["wire"].append(_rate(_by_wire, frames))
        rates["protobuf"].append(_rate(_by_protobuf, frames))
    wire, protobuf = statistics.median(rates["wire"]), statistics.median(rates["protobuf"])
    print_table(("code", "messages/s"), [("wire.py", f"{wire:,.0f}"), ("protobuf", f"{protobuf:,.0f}")])
    unit = "messages/s"
    report(
        [
            Case(case="messages_wire", value=wire, unit=unit, goal=None, direction="higher"),
            Case(case="messages_protobuf", value=protobuf, unit=unit, goal=None, direction="higher"),
            Case(case="messages_speedup", value=wire / protobuf, unit="ratio", goal=SPEEDUP_GOAL, direction="higher"),
        ],
        options.json,
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's options."""
    found = benchmark_parser("messages", __doc__)
    found.add_argument("--messages", type=at_least(1), default=64, help="messages of a turn (64)")
    found.add_argument("--turns", type=at_least(1), default=5, help="turns of each (5)")
    add_report_option(found)
    return found


def _rate(through: Callable[[Frame], Frame], frames: Sequence[Frame]) -> float:
    """Return messages per second of processor time."""
    begin = time.process_time()
    for frame in frames:
        if len(through(frame).payload) != FRAME_BYTES:
            raise AssertionError("a payload was lost")
    return len(frames) / (time.process_time() - begin)


def _by_wire(frame: Frame) -> Frame:
    (upload,) = readable([unpack_upload(pack(Upload(caller=pb2.Caller(), round=1, frames=[frame])))])
    return upload.frames[0]


def _by_protobuf(frame: Frame) -> Frame:
    data = pb2.UploadRequest(caller=pb2.Caller(), round=1, frames=[frame.to_message()]).SerializeToString()
    return Frame.from_message(pb2.UploadRequest.FromString(data).frames[0])


if __name__ == "__main__":
    sys.exit(main())
