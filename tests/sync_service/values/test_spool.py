# SPDX-License-Identifier: Apache-2.0
"""The spool after a restart: who waits for what a former server has left."""

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.values.contribution import Contribution, Discarded
from megatron_ext.sync_service.values.spool import Spool
from tests.sync_service.small_frames import SIDE, catalog_of, pieces


class SlowDisk:
    """Lets frames be found only when it is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading, self.continues = threading.Event(), threading.Event()
        load = Contribution._load

        def slow(contribution: Contribution, *arguments: Any) -> Frame:
            if "slow" in contribution._path.name:
                self.reading.set()
                assert self.continues.wait(60)
            return load(contribution, *arguments)

        monkeypatch.setattr(Contribution, "_load", slow)


def left_by_a_former_server(folder: Path, count: int) -> Catalog:
    catalog = catalog_of((SIDE, SIDE))
    spool = Spool(folder)
    spool.open_round(1)
    for frame in pieces(count):
        spool.contribution("slow", 1, catalog, "fp32").append(frame)
    return catalog


def test_nobody_waits_while_a_contribution_of_a_former_server_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    catalog, disk = left_by_a_former_server(tmp_path, 5), SlowDisk(monkeypatch)
    spool = Spool(tmp_path)
    taken: list[bool] = []

    def continues() -> None:
        found = spool.contribution("slow", 1, catalog, "fp32")
        taken.extend(found.append(frame) for frame in pieces(7))

    slow = threading.Thread(target=continues, daemon=True)
    slow.start()
    assert disk.reading.wait(60)
    fast = threading.Thread(
        target=lambda: spool.contribution("q", 1, catalog, "fp32").append(pieces(1)[0]), daemon=True
    )
    fast.start()
    fast.join(10)
    assert not fast.is_alive() and spool.nbytes["q"] > 0
    assert spool.sent_alone(1, catalog["t0"]) is None
    disk.continues.set()
    slow.join(60)
    assert taken == [False] * 5 + [True] * 2
    assert spool.contribution("slow", 1, catalog, "fp32").frames == 7


def test_a_contribution_that_is_dropped_while_it_is_read_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    catalog, disk = left_by_a_former_server(tmp_path, 5), SlowDisk(monkeypatch)
    spool = Spool(tmp_path)
    found = spool.contribution("slow", 1, catalog, "fp32")
    seen: list[type] = []

    def append() -> None:
        try:
            found.append(pieces(1)[0])
        except Discarded as error:
            seen.append(type(error))

    slow = threading.Thread(target=append, daemon=True)
    slow.start()
    assert disk.reading.wait(60)
    dropped = threading.Thread(target=spool.discard, args=("slow",), daemon=True)
    dropped.start()
    while not found._is_unwanted:
        pass
    disk.continues.set()
    dropped.join(60)
    slow.join(60)
    assert seen == [Discarded] and found._count <= 1 and not list(tmp_path.glob("*/*"))


def test_a_contribution_that_was_dropped_before_it_was_read_takes_no_more_frames(tmp_path: Path):
    catalog = left_by_a_former_server(tmp_path, 5)
    spool = Spool(tmp_path)
    found = spool.contribution("slow", 1, catalog, "fp32")
    spool.discard("slow")
    with pytest.raises(Discarded):
        found.append(pieces(1)[0])
    assert spool.contribution("slow", 1, catalog, "fp32").append(pieces(1)[0])
