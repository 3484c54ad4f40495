# SPDX-License-Identifier: Apache-2.0
"""A link does to bytes what the driver wants, and nothing else."""

import random
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.relay import DataFrames, Direction, Relay

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, 0)) + (1).to_bytes(4) + payload


@given(cuts=st.lists(st.integers(1, 50000), max_size=20), seed=st.integers(0, 100), flips=st.integers(0, 3))
def test_bits_are_flipped_in_frames_of_values_alone_however_they_are_cut(cuts: list[int], seed: int, flips: int):
    small, large, head = frame(0, bytes(8000)), frame(0, bytes(9000)), frame(1, bytes(9000))
    stream = PREFACE + head + small + large + head + large + small
    direction = Direction()
    direction.flips = flips
    frames = DataFrames(is_up=True, dice=random.Random(seed))
    places = sorted({min(cut, len(stream)) for cut in cuts})
    parts = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    passed = b"".join(frames.passed(part, direction) for part in parts)
    changed = [at for at, (a, b) in enumerate(zip(stream, passed, strict=True)) if a != b]
    assert len(changed) == min(flips, 2)
    first = len(PREFACE + head + small) + 9
    second = first + 9000 + len(head) + 9
    for at, begin in zip(changed, (first, second), strict=False):
        assert begin + 4500 <= at < begin + 9000
        assert (stream[at] ^ passed[at]).bit_count() == 1


@pytest.fixture
def link() -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """Yield a relay, and both ends of a connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname()[1], seed=1)
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port))) as peer:
            server, _ = listener.accept()
            with server:
                yield relay, peer, server
    relay.close()


def test_a_cut_in_one_direction_keeps_what_was_sent_until_it_is_repaired(link):
    relay, peer, server = link
    relay.up.is_open = False
    peer.sendall(b"up")
    server.sendall(b"down")
    assert peer.recv(100) == b"down"
    server.settimeout(0.3)
    with pytest.raises(TimeoutError):
        server.recv(100)
    relay.repair()
    server.settimeout(60)
    assert server.recv(100) == b"up"


def test_who_goes_is_gone_at_the_other_end_too(link):
    _, peer, server = link
    peer.shutdown(socket.SHUT_RDWR)
    assert server.recv(100) == b""


def test_a_server_that_is_away_refuses_and_the_link_is_there_when_it_comes_back():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    relay = Relay(port, seed=1)
    host, own = relay.address.split(":")
    with socket.create_connection((host, int(own))) as peer:
        assert peer.recv(100) == b""
    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(b"back"), daemon=True).start()
        with socket.create_connection((host, int(own))) as peer:
            assert peer.recv(100) == b"back"
    relay.close()
