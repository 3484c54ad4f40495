# SPDX-License-Identifier: Apache-2.0
"""Hostile messages that are kept: each gets the answer that stands beside it, and no bit of a round changes.

corpus.jsonl has a message a line: the method, what is hostile about it, its bytes, and the status that answers it. They
are of a peer `x0` with the process `process` in the run `garbage`, which has published its start. What fuzzing or a
user finds is added as a line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.protocol.wire import Unreadable, unpack_upload
from tests.support.waiting import until
from tests.sync_service.server.test_fuzz import requests
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import calling
from tests.sync_service.toy_peer import digest, start_values, trained

MakeService = Callable[..., Service]
Code = grpc.StatusCode
CORPUS = [json.loads(line) for line in Path(__file__).with_name("corpus.jsonl").read_text("ascii").splitlines()]
UPLOADS = [entry for entry in CORPUS if entry["method"] == "Upload"]


def bytes_of(entry: dict[str, Any]) -> bytes:
    """Return the bytes of a message; a registration of the protocol that was spoken then speaks today's."""
    data = bytes.fromhex(entry["bytes"])
    if entry["method"] != "Register" or "another protocol" in entry["what"]:
        return data
    request = pb2.RegisterRequest.FromString(data)
    request.protocol = PROTOCOL_VERSION
    return bytes(request.SerializeToString())


def test_every_message_of_the_corpus_gets_its_answer_and_changes_no_bit(make_service: MakeService):
    start = start_values(7)
    service = make_service({"demo": {"peers": 1}, "garbage": {"peers": 2}})
    server = service.start()
    with calling(service.address) as caller, service.client("p0", start, run="demo") as client:
        for method in ("Register", "Upload", "Commit"):
            assert caller.send(method, requests("x0")[method][0])[0] is Code.OK
        until(lambda: service.events("committed", "garbage"), "the start of the run")
        values = client.start(start)
        before = service.journal("garbage"), service.journal("demo")
        answers = []
        for entry in CORPUS:
            code, said = caller.send(entry["method"], bytes_of(entry), seconds=10.0)
            answers.append((entry["what"], code.name))
            assert code is Code.OK or 0 < len(said) < 3000
        assert answers == [(entry["what"], entry["answer"]) for entry in CORPUS]
        assert (service.journal("garbage"), service.journal("demo")) == before
        sent = trained(values, 0, 1)
        assert digest(client.sync(sent).values) == digest(sent)
    assert server.exit_code is None and "Traceback" not in server.output
    assert not [path for path in service.folder.parent.rglob("*pwned*")]


def test_the_corpus_has_messages_to_every_method():
    methods = {method.name for method in pb2.DESCRIPTOR.services_by_name["SyncService"].methods}
    assert {entry["method"] for entry in CORPUS} == methods - {"Drain"}  # whose request has no fields
    messages = {(entry["method"], entry["bytes"]) for entry in CORPUS}
    assert len({entry["what"] for entry in CORPUS}) == len(messages) == len(CORPUS) > 60
    assert len(UPLOADS) > 20


@pytest.mark.parametrize("entry", UPLOADS, ids=[entry["what"].replace(" ", "-") for entry in UPLOADS])
def test_hostile_frames_are_refused_before_anything_is_made_of_them(entry: dict[str, Any]):
    found = unpack_upload(bytes.fromhex(entry["bytes"]))
    if isinstance(found, Unreadable):
        assert entry["answer"] == "INVALID_ARGUMENT" and found.problem
        return
    for frame in found.frames:
        assert isinstance(frame, Frame)
        try:
            frame.check()
        except Refusal as refusal:
            assert str(refusal).isprintable() and len(str(refusal)) < 3000
