# SPDX-License-Identifier: Apache-2.0
"""Programs that import the client as the documents of former releases said find it, and are told where it is now."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("former", "now", "names"),
    [
        ("client", "peer.client", ("ClientConfig", "Report", "SyncClient")),
        ("connection", "channel.connection", ("ConnectionConfig",)),
    ],
)
def test_a_former_place_gives_the_same_objects_and_names_the_new_one(former: str, now: str, names: tuple[str, ...]):
    sys.modules.pop(f"megatron_ext.sync_service.{former}", None)
    with pytest.warns(FutureWarning, match=f"import from megatron_ext.sync_service.{now}$"):
        found = importlib.import_module(f"megatron_ext.sync_service.{former}")
    moved = importlib.import_module(f"megatron_ext.sync_service.{now}")
    for name in names:
        assert getattr(found, name) is getattr(moved, name)
