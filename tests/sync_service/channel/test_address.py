# SPDX-License-Identifier: Apache-2.0
"""Addresses as people write them."""

import pytest

from megatron_ext.sync_service.channel.address import is_loopback, split_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("[::1]", 65535)),
        ("node-1.example.org:443", ("node-1.example.org", 443)),
    ],
)
def test_host_and_port_are_told_apart(text: str, address: tuple[str, int]):
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:x", "host:65536", "host:-1", "host:+1", "host: 1", "a b:1", "http://host:1",
     "::1:1", "[]:1", "[::1:1", "host:\u0661", "ho\0st:1", "host:0"],
)  # fmt: skip
def test_what_is_not_an_address_is_none(text: str):
    assert split_address(text) is None


def test_a_listener_may_let_the_system_choose_its_port():
    assert split_address("127.0.0.1:0", any_port=True) == ("127.0.0.1", 0)


def test_only_this_machines_own_addresses_are_loopback():
    assert all(map(is_loopback, ("localhost", "127.8.9.1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "[::]", "10.0.0.1", "127.evil.example")))
