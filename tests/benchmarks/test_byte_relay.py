# SPDX-License-Identifier: Apache-2.0
"""The relay makes a link long: everything comes later by as much in each direction, whole and in order."""

import socket
import threading
import time

from benchmarks.byte_relay import ByteRelay


def test_what_passes_a_long_link_comes_later_and_in_order_both_ways():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        with ByteRelay(listener.getsockname()[1], seconds=0.1) as relay:
            host, _, port = relay.address.rpartition(":")
            with socket.create_connection((host, int(port))) as connection:
                begun = time.monotonic()
                sent = bytes(range(256)) * 4000
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received == sent
    # There and back; nothing but a lower bound is asked of the clock.
    assert time.monotonic() - begun >= 0.2
    assert (relay.up, relay.down) == (len(sent), len(sent))


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)
