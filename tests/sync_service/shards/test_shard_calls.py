# SPDX-License-Identifier: Apache-2.0
"""What servers of a run say to each other is refused with the field's name when it is something else, by both."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.outer.penalty import Verdict
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.protocol import PROTOCOL_VERSION, grpc, pb2
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.server import shard_run
from megatron_ext.sync_service.shards.remote_shard import RemoteShard, ShardProblem
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shard_calls import Word
from megatron_ext.sync_service.shards.shard_messages import (
    made_message,
    measured_message,
    squares_message,
    work_message,
)
from megatron_ext.sync_service.values.decision import Decision, Measured
from megatron_ext.sync_service.values.reduction import DamagedContribution, Made
from tests.sync_service.cluster import Cluster
from tests.sync_service.hostile import variants
from tests.sync_service.other_server import Refused, serving
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import calling, shard_request, word
from tests.sync_service.shards.test_sharding import Shard1

MakeService = Callable[..., Service]
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
    return {
        "follow": word(
            ADDRESSES, shard.config, CATALOG, members={"p": "i"}, kept={"p": 0}, used={"p": 0}, last_round=9
        ),
        "seal": pb2.Seal(peer="p", instance="i", index=0, round=0),
        "measure": work_message(JOB, None),
        "common_squares": work_message(JOB, DECISION),
        "write": work_message(JOB, DECISION),
    }


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
    for message in variants(good):
        try:
            shard.run.answer(shard_request(call, message))
        except Refusal as refusal:
            refused += 1
            assert len(str(refusal)) < 2100
            if refusal.reason == "invalid":
                assert str(refusal).isprintable()
    assert refused > 40
    inside = "at/some/depth/of/folders/shard/"
    assert all(name.startswith(inside) for name in files(tmp_path))
    # What a request has to do with that makes sense is what has been uploaded, which is nothing.
    after = {name: content for name, content in files(tmp_path).items() if content or "/spool/" not in name}
    if call != "follow":
        assert {name: content for name, content in after.items() if "/spare/" not in name} == before


TWICE = {"accepted": (1, 1), "weights": (0.5, 0.5)}
SHORT = {"accepted": (0, 1), "weights": (1.0,)}
NOTHING = {"accepted": (0,), "weights": (0.0,)}


@pytest.mark.parametrize(
    ("call", "changes", "problem"),
    [
        ("follow", {"members": {"../p": "i"}}, "a key of follow.members is '../p'; it must be a name"),
        ("follow", {"members": {"p": "/i"}}, "follow.members is '/i'; it must be a name"),
        ("follow", {"kept": {"p": 1 << 60}}, f"follow.kept is {1 << 60}; it must be a whole number of 0 to"),
        ("follow", {"open_round": 1 << 60}, f"follow.open_round is {1 << 60}; it must be a whole number"),
        ("follow", {"last_round": -2}, "follow.last_round is -2; it must be a whole number of -1 to"),
        ("follow", {"id": "x" * 65}, "it must be text of up to 64 letters"),
        ("follow", {"catalog": {}}, "codec '' is not known"),
        ("follow", {"catalog": {"codec": "fp32"}}, "the catalog has 0 tensors"),
        ("follow", {"catalog": {"codec": "zip"}}, "follow.catalog.codec: codec 'zip' is not known; use one of fp32"),
        ("seal", {"peer": "../p"}, "seal.peer is '../p'; it must be a name"),
        ("seal", {"index": 4096}, "seal.index is 4096; it must be a whole number of 0 to 4095"),
        ("write", {"decision": None}, "write.decision is missing"),
        ("write", {"decision": {"verdicts": {"verdicts": [TWICE]}}}, "verdicts[0].accepted has an index twice"),
        ("write", {"decision": {"verdicts": {"verdicts": [SHORT]}}}, "weights has 1 entries, and accepted 2"),
        ("write", {"decision": {"verdicts": {"verdicts": [NOTHING]}}}, "verdicts[0].weights are all nothing"),
        ("write", {"decision": {"coefficients": [{"value": 5e3}]}}, "coefficients[0] is 5000.0; it must be a finite"),
        ("write", {"job": {"outer_scalars": {"a": math.nan}}}, "write.job.outer_scalars.'a' is nan; it must be"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(shard: Shard1, call: str, changes: dict[str, Any], problem: str):
    good = requests(shard)[call]
    shard.follow(members={"p": "i"})
    for field in changes:
        good.ClearField(field)
    good.MergeFrom(type(good)(**changes))
    with pytest.raises(Refusal) as refused:
        shard.run.answer(shard_request(call, good))
    assert problem in str(refused.value) and refused.value.reason == "invalid"


def test_a_request_for_nothing_is_refused(shard: Shard1):
    with pytest.raises(Refusal, match="nothing is asked for that a shard does; install the same release everywhere"):
        shard.run.answer(pb2.ShardRequest(run="demo"))


def uploader(peer: str = "p", index: int = 0, made_for: int = 0) -> Uploader:
    return Uploader(peer=peer, index=index, made_for=made_for)


GOOD = RoundJob(number=0, uploaders=(uploader(),), outer_scalars={})


@pytest.mark.parametrize(
    ("uploaders", "decision", "problem"),
    [
        ((uploader(), uploader()), Decision(), "write.job.uploaders has a peer or an index twice"),
        ((uploader(index=2),), Decision(), "write.job.uploaders has index 2; there are 2 peers"),
        ((uploader(made_for=1),), Decision(), "write.job.uploaders has one made for round 1, not 0"),
        ((), Decision(), "the start is one peer's, which counts; 0 have uploaded"),
        ((uploader(),), Decision(rejected={"p": "no"}), "the start is one peer's, which counts"),
        ((uploader(),), Decision(verdicts={}), "write.decision.verdicts has nothing of"),
    ],
)
def test_work_that_contradicts_itself_or_the_run_is_refused(
    shard: Shard1, uploaders: tuple[Uploader, ...], decision: Decision, problem: str
):
    shard.follow(members={"p": "i"})
    shard.upload("p", "i")
    job = RoundJob(number=0, uploaders=uploaders, outer_scalars={})
    with pytest.raises(Refusal, match=problem.replace("(", r"\(")):
        shard.run.answer(shard_request("write", work_message(job, decision)))
    assert shard.run.answer(shard_request("write", work_message(GOOD, Decision()))).write.plain_sum


def test_news_of_rounds_that_are_not_here_removes_nothing(shard: Shard1):
    shard.follow(members={"p": "i"})
    shard.upload("p", "i")
    shard.run.answer(shard_request("write", work_message(GOOD, Decision())))
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


FOLLOWED = pb2.Followed(spooled={"p": 5}, codecs={"fp32": ""})
ANSWERS: dict[str, Any] = {
    "seal": pb2.Sealed(frames=1, bytes=5),
    "measure": measured_message([Measured(squares={("norm", False): 1.0}, unusable="w", nbytes=5)]),
    "common_squares": squares_message({("norm", False): 1.0}),
    "write": made_message(Made(sums=(1, 2), outer_scalars={"step": 1.0})),
}


@pytest.fixture
def answering() -> Iterator[tuple[dict[str, Any], RemoteShard]]:
    """What a server answers, and what the first one makes of it."""
    answers = {"follow": pb2.ShardReply(follow=FOLLOWED)}
    failed: list[BaseException] = []

    def answer(request: Any) -> Any:
        return answers[request.WhichOneof("call")]

    def told() -> Word:
        return Word(shards=(), config={}, id="", open_round=0, members={}, kept={}, used={}, last_round=None)

    with serving("Shard", pb2.ShardRequest, answer) as address:
        connection = ConnectionConfig(server=address, patience_seconds=0.0)
        remote = RemoteShard(
            1, "demo", connection, threading.Condition(), told, lambda _: (CATALOG, "fp32"), failed.append
        )
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


@pytest.mark.parametrize("call", ["seal", "measure", "common_squares", "write"])
def test_any_other_value_in_any_place_of_an_answer_is_a_problem_of_that_shard(
    answering: tuple[dict[str, Any], RemoteShard], call: str
):
    answers, remote = answering
    good = ANSWERS[call]
    answers[call] = pb2.ShardReply(**{call: good})
    asked(remote, call)
    others = [pb2.ShardReply(**{other: answer}) for other, answer in ANSWERS.items() if other != call]
    damaged = [pb2.ShardReply(damaged=message) for message in variants(pb2.Damaged(peer="x", problem="y"))]
    texts = [pb2.ShardReply(**{call: message}) for message in variants(good)]
    problems = 0
    for message in [pb2.ShardReply(), *others, *damaged, *texts]:
        answers[call] = message
        try:
            asked(remote, call)
        except ShardProblem as problem:
            problems += 1
            said = str(problem)
            assert said.startswith(f"shard 1 at {remote.address}: its answer to {call}: ") and problem.is_refusal
            assert said.endswith("; install the same release everywhere") and said.isprintable()
    assert problems >= 1 + len(others) + len(damaged)


@pytest.mark.parametrize(
    ("call", "answer", "problem"),
    [
        ("measure", {"measure": {}}, "its answer to measure: it has 0 contributions of 1"),
        ("measure", {"damaged": {"peer": "q"}}, "its answer to measure: peer 'q' has contributed nothing"),
        ("write", {"damaged": {"peer": "../q"}}, "its answer to write: write.damaged.peer is '../q'; it"),
        ("write", {"write": {"outer_scalars": {"a": math.inf}}}, "write.outer_scalars.'a' is inf; it must be a finite"),
        ("common_squares", {"common_squares": {"squares": [{"value": -1.0}]}}, "squares[0] is -1.0; it must be"),
        ("measure", {"measure": {"contributions": [{"squares": [{"value": 1e301}]}]}}, "squares[0] is 1e+301; it must"),
        ("write", {"seal": {}}, "its answer to write: it is one to seal"),
        ("seal", {"damaged": {"peer": "p"}}, "its answer to seal: it is one to damaged"),
        ("write", {}, "its answer to write: it is empty"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(
    answering: tuple[dict[str, Any], RemoteShard], call: str, answer: dict[str, Any], problem: str
):
    answers, remote = answering
    answers[call] = pb2.ShardReply(**answer)
    with pytest.raises(ShardProblem) as found:
        asked(remote, call)
    assert problem in str(found.value)


def test_a_damaged_contribution_is_not_a_problem_of_the_shard(answering: tuple[dict[str, Any], RemoteShard]):
    answers, remote = answering
    answers["measure"] = pb2.ShardReply(damaged={"peer": "p", "problem": "a checksum is wrong"})
    with pytest.raises(DamagedContribution, match=r"peer 'p' is damaged .*a checksum is wrong \(on shard 1\)"):
        asked(remote, "measure")


def text_field(number: int, text: str) -> bytes:
    return bytes((number << 3 | 2, len(text))) + text.encode()


def test_a_first_server_of_an_earlier_protocol_is_refused_by_name(make_service: MakeService):
    cluster = Cluster(make_service(), 2)
    cluster.start(1)
    # As protocol 4 has it: the call's name, and JSON.
    asked_by_an_older = text_field(1, "demo") + text_field(2, "follow") + text_field(3, '{"shard": 1}')
    with calling(cluster.addresses[1]) as caller:
        code, said = caller.send("Shard", asked_by_an_older)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"speaks protocol {PROTOCOL_VERSION}, the first server an earlier one; install the same release" in said


def test_a_shard_of_an_earlier_protocol_is_named(answering: tuple[dict[str, Any], RemoteShard]):
    answers, remote = answering
    answers["seal"] = Refused(grpc.StatusCode.INVALID_ARGUMENT, "it is not JSON")
    with pytest.raises(ShardProblem) as found:
        asked(remote, "seal")
    ours = f"this server speaks protocol {PROTOCOL_VERSION}; install the same release everywhere"
    where = f"shard 1 at {remote.address} cannot read a request (it is not JSON)"
    assert str(found.value) == f"{where}; {ours}" and found.value.is_refusal
