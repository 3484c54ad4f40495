# SPDX-License-Identifier: Apache-2.0
"""What servers of a run say to each other is refused with the field's name when it is something else, by both."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.protocol import pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.server import shard_run
from megatron_ext.sync_service.shards.remote_shard import RemoteShard, ShardProblem
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shard_messages import (
    decision_to_json,
    job_to_json,
    measured_from_json,
    measured_to_json,
)
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.reduction import Alone, DamagedContribution
from tests.sync_service.hostile import TOKENS, VALUES, places, with_value
from tests.sync_service.other_server import serving
from tests.sync_service.shard_caller import word
from tests.sync_service.shards.test_sharding import Shard1

ADDRESSES = ("a:1", "b:1")
CATALOG = Catalog([TensorSpec(name="norm", shape=(8,)), TensorSpec(name="expert", shape=(4, 2), owners=(1,))])
UNITS = sorted({spec.judged_as for spec in CATALOG})
VERDICT = Verdict(accepted=(0,), weights=(1.0,), log_weights=(0.0,), norms=(1.0,))
DECISION = Decision(
    rejected={"q": "is far too large"}, verdicts=dict.fromkeys(UNITS, VERDICT), coefficients={("norm", False): 0.5}
)
JOB = RoundJob(number=0, uploaders=(Uploader(peer="p", index=0, made_for=0),), outer_scalars={"step": 1.0})


def requests(shard: Shard1) -> dict[str, Any]:
    """Return a good request of every call, some of which do not fit the state of the shard."""
    alone = RoundJob(number=0, uploaders=JOB.uploaders, outer_scalars={}, alone=Alone(weight=1.0, per_step=2))
    plain = {"job": job_to_json(JOB), "decision": decision_to_json(Decision())}
    found = {
        "follow": word(ADDRESSES, shard.config, CATALOG, members={"p": "i"}, kept={"p": 0}, used={"p": None}),
        "seal": {"peer": "p", "instance": "i", "index": 0, "round": 0},
        "measure": {**plain, "decision": None},
        "common_squares": {"job": job_to_json(JOB), "decision": decision_to_json(DECISION)},
        "write": {"job": job_to_json(alone), "decision": decision_to_json(DECISION)},
    }
    # As it is when it has come through JSON.
    return json.loads(json.dumps(found))


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard1:
    """A shard that waits for nobody."""
    monkeypatch.setattr(shard_run, "WORD_SECONDS", 0.0)
    return Shard1(tmp_path / "at" / "some" / "depth" / "of" / "folders" / "shard", CATALOG)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("call", ["follow", "seal", "measure", "common_squares", "write"])
def test_any_other_value_in_any_place_of_a_request_is_refused_or_makes_sense(shard: Shard1, tmp_path: Path, call: str):
    good = requests(shard)[call]
    if call != "follow":
        shard.follow(members={"p": "i"})
    before = files(tmp_path)
    refused = 0
    for at in places(good):
        for value in VALUES:
            try:
                shard.run.answer(call, with_value(good, at, value))
            except Refusal as refusal:
                refused += 1
                assert len(str(refusal)) < 2100
                if refusal.reason == "invalid":
                    assert str(refusal).isprintable()
    assert refused > 100
    for key in good.keys() - {"catalog", "codec"}:
        lacking = {name: held for name, held in good.items() if name != key}
        with pytest.raises(Refusal, match=rf"{call}.{key} is missing"):
            shard.run.answer(call, lacking)
    with pytest.raises(Refusal, match=rf"{call}.'\.\./pwned' is not known; the fields are"):
        shard.run.answer(call, {**good, "../pwned": 1})
    inside = "at/some/depth/of/folders/shard/"
    assert all(name.startswith(inside) for name in files(tmp_path))
    # What a request has to do with that makes sense is what has been uploaded, which is nothing.
    after = {name: content for name, content in files(tmp_path).items() if content or "/spool/" not in name}
    if call != "follow":
        assert {name: content for name, content in after.items() if "/spare/" not in name} == before


@pytest.mark.parametrize(
    ("call", "changes", "problem"),
    [
        ("follow", {"members": {"../p": "i"}}, "a key of follow.members is '../p'; it must be a name"),
        ("follow", {"members": {"p": "/i"}}, "follow.members.p is '/i'; it must be a name"),
        ("follow", {"open_round": -1}, "follow.open_round is -1; it must be a whole number"),
        ("follow", {"catalog": []}, "the catalog has 0 tensors"),
        ("follow", {"codec": "zip"}, "follow.codec: codec 'zip' is not known; use one of fp32"),
        ("seal", {"peer": "../p"}, "seal.peer is '../p'; it must be a name"),
        ("seal", {"round": 1e3}, "seal.round is 1000.0; it must be a whole number"),
        ("write", {"decision": None}, "write.decision is missing"),
        ("lunch", {}, "'lunch' is nothing that a shard does"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(shard: Shard1, call: str, changes: dict[str, Any], problem: str):
    good = {**requests(shard), "lunch": {}}[call]
    shard.follow(members={"p": "i"})
    if call == "write":
        good["job"]["alone"] = None
    with pytest.raises(Refusal) as refused:
        shard.run.answer(call, {**good, **changes})
    assert problem in str(refused.value) and refused.value.reason == "invalid"


def uploader(peer: str = "p", index: int = 0, made_for: int = 0) -> Uploader:
    return Uploader(peer=peer, index=index, made_for=made_for)


@pytest.mark.parametrize(
    ("uploaders", "decision", "alone", "problem"),
    [
        ((uploader(), uploader()), Decision(), None, "write.job.uploaders has a peer or an index twice"),
        ((uploader(index=2),), Decision(), None, "write.job.uploaders has index 2; there are 2 peers"),
        ((uploader(made_for=1),), Decision(), None, "write.job.uploaders has one made for round 1, not 0"),
        ((), Decision(), None, "the start is one peer's, which counts; 0 have uploaded"),
        ((uploader(),), Decision(rejected={"p": "no"}), None, "the start is one peer's, which counts"),
        ((uploader(),), Decision(verdicts={}), None, "write.decision.verdicts has nothing of"),
        ((uploader(),), Decision(), Alone(weight=1.0, per_step=1), "write.job.alone is given; rounds are synchronous"),
    ],
)
def test_work_that_contradicts_itself_or_the_run_is_refused(
    shard: Shard1, uploaders: tuple[Uploader, ...], decision: Decision, alone: Alone | None, problem: str
):
    shard.follow(members={"p": "i"})
    shard.upload("p", "i")
    job = job_to_json(RoundJob(number=0, uploaders=uploaders, outer_scalars={}, alone=alone))
    with pytest.raises(Refusal, match=problem.replace("(", r"\(")):
        shard.run.answer("write", {"job": job, "decision": decision_to_json(decision)})
    good = {"job": job_to_json(RoundJob(number=0, uploaders=(uploader(),), outer_scalars={}))}
    assert shard.run.answer("write", {**good, "decision": decision_to_json(Decision())})["sums"]


def test_news_of_rounds_that_are_not_here_removes_nothing(shard: Shard1):
    shard.follow(members={"p": "i"})
    shard.upload("p", "i")
    good = {"job": job_to_json(RoundJob(number=0, uploaders=(uploader(),), outer_scalars={}))}
    shard.run.answer("write", {**good, "decision": decision_to_json(Decision())})
    snapshots = files(shard.folder / "snapshots")
    assert len(snapshots) == 1
    again = Shard1(shard.folder, CATALOG)
    with pytest.raises(Refusal, match="its folder lacks values of run 'demo', or they are damaged"):
        again.follow(open_round=9)
    assert files(shard.folder / "snapshots") == snapshots


def test_a_damaged_identity_is_named(shard: Shard1):
    shard.follow()
    for content in ("{", "[]", '{"id": 5, "shard": 1, "shards": 2}', '{"id": "one"}'):
        (shard.folder / "shard.json").write_text(content)
        with pytest.raises(Refusal, match=r"shard.json is damaged \(.*\); restore it from a copy"):
            shard.follow()


FOLLOWED = '{"wants_catalog": false, "spooled": {"p": 5}, "codecs": {"fp32": ""}}'
ANSWERS: dict[str, Any] = {
    "follow": json.loads(FOLLOWED),
    "seal": {"missing": None, "frames": 1, "bytes": 5},
    "measure": {"measured": [measured_to_json(Measured(squares={("norm", False): 1.0}, nbytes=5))]},
    "common_squares": {"squares": [["norm", False, 1.0]]},
    "write": {"sums": [1, 2], "outer_scalars": {"step": 1.0}},
}


@pytest.fixture
def answering() -> Iterator[tuple[dict[str, str], RemoteShard]]:
    """What a server answers, and what the first one makes of it."""
    answers = {"follow": FOLLOWED}
    failed: list[BaseException] = []

    def answer(request: Any) -> Any:
        return pb2.ShardReply(json=answers[request.call])

    with serving("Shard", pb2.ShardRequest, answer) as address:
        connection = ConnectionConfig(server=address, patience_seconds=0.0)
        remote = RemoteShard(1, "demo", connection, threading.Condition(), dict, lambda _: {}, failed.append)
        yield answers, remote
        remote.stop()
    assert not failed


def asked(remote: RemoteShard, call: str) -> Any:
    match call:
        case "seal":
            return remote.seal("p", "i", 0, 0)
        case "measure":
            return remote.measure(JOB)
        case "common_squares":
            return remote.common_squares(JOB, DECISION)
        case "write":
            return remote.write(JOB, DECISION)
    raise AssertionError(call)


def test_an_unusable_tensor_has_the_name_that_shards_of_other_releases_read():
    measured = Measured(squares={}, unusable="layer.0.weight", nbytes=5)
    message = {"squares": [], "broken": "layer.0.weight", "nbytes": 5}
    assert measured_to_json(measured) == message
    assert measured_from_json(message) == measured


@pytest.mark.parametrize("call", ["seal", "measure", "common_squares", "write"])
def test_any_other_value_in_any_place_of_an_answer_is_a_problem_of_that_shard(
    answering: tuple[dict[str, str], RemoteShard], call: str
):
    answers, remote = answering
    good = ANSWERS[call]
    answers[call] = json.dumps(good)
    asked(remote, call)
    texts = [json.dumps(with_value(good, at, value)) for at in places(good) for value in VALUES]
    problems = 0
    for text in [*texts, *TOKENS, *(json.dumps(good)[:-1] + token for token in TOKENS)]:
        answers[call] = text
        try:
            asked(remote, call)
        except ShardProblem as problem:
            problems += 1
            said = str(problem)
            assert said.startswith(f"shard 1 at {remote.address}: its answer to {call}: ") and problem.is_refusal
            assert said.endswith("; install the same release everywhere") and said.isprintable()
    assert problems > 50


@pytest.mark.parametrize(
    ("call", "answer", "problem"),
    [
        ("measure", '{"measured": []}', "its answer to measure: it has 0 contributions of 1"),
        ("measure", '{"damaged": ["q", "x"]}', "its answer to measure: peer 'q' has contributed nothing"),
        ("write", '{"damaged": ["../q", "x"]}', "its answer to write: write.damaged[0] is '../q'; it must be a name"),
        ("write", '{"sums": [1], "outer_scalars": {}}', "write.sums has 1 entries; it must have 2"),
        ("write", "", "its answer to write: it is not JSON"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(
    answering: tuple[dict[str, str], RemoteShard], call: str, answer: str, problem: str
):
    answers, remote = answering
    answers[call] = answer
    with pytest.raises(ShardProblem) as found:
        asked(remote, call)
    assert problem in str(found.value)


def test_a_damaged_contribution_is_not_a_problem_of_the_shard(answering: tuple[dict[str, str], RemoteShard]):
    answers, remote = answering
    answers["measure"] = '{"damaged": ["p", "a checksum is wrong"]}'
    with pytest.raises(DamagedContribution, match=r"peer 'p' is damaged .*a checksum is wrong \(on shard 1\)"):
        asked(remote, "measure")
