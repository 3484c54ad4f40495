# SPDX-License-Identifier: Apache-2.0
"""Several servers that have parts of the values: the bits of one, whoever is killed, and clear words about misfits."""

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.penalty import Penalty
from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Frame, whole_box
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import ServerConfig
from megatron_ext.sync_service.server.shard_run import ShardRun
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shard_calls import Followed, Work
from megatron_ext.sync_service.shards.shard_messages import read_followed, read_sealed, read_work, work_message
from megatron_ext.sync_service.shards.sharding import assign
from megatron_ext.sync_service.values.decision import Decision
from megatron_ext.sync_service.values.failpoints import Failpoints
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.service import Service
from tests.sync_service.shard_caller import shard_request, word
from tests.sync_service.toy_peer import digest, start_values, trained
from tests.sync_service.whole_runs import ROUNDS

MakeService = Callable[..., Service]
RUNS: dict[str, dict[str, Any]] = {
    "guarded": {
        "peers": 2,
        "outer_optimizer": "sgd",
        "outer_optimizer_lr": 0.7,
        "skip_anomaly": True,
        "pseudo_gradnorm_reduce": True,
        "clip_pseudo_grad": 1.0,
    },
    "coded": {"peers": 2, "outer_optimizer": "adam", "outer_optimizer_lr": 0.01},
    "merged": {"peers": 2, "sync_steps": 1, "merge_interval": 1, "merge_alpha_start": 0.1, "merge_topk": 2},
}
EXPERTS = [
    TensorSpec(
        name=f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc{fc}.weight",
        shape=(8, 4) if fc == 1 else (4, 4),
        # As plain tensors have it: nothing but their names says that they belong together.
        unit=f"{layer}.{expert}.{fc}",
        owners=(expert % 2,),
    )
    for layer in range(2)
    for expert in range(4)
    for fc in (1, 2)
]
CATALOG = Catalog([TensorSpec(name="embedding", shape=(30, 8)), *EXPERTS, TensorSpec(name="norm", shape=(8,))])


def values_of(catalog: Catalog, seed: int) -> dict[str, torch.Tensor]:
    return start_values(seed, {spec.name: spec.shape for spec in catalog})


def train_experts(service: Service) -> str:
    """Make rounds of the experts' run with two peers in this process, and return the digest of what they end with."""
    start = values_of(CATALOG, 3)
    with (
        service.client("p0", CATALOG, run="merged", index=0) as p0,
        service.client("p1", CATALOG, run="merged", index=1) as p1,
    ):
        held = {client: client.start(start) for client in (p0, p1)}
        for number in range(1, ROUNDS + 1):
            sent = {client: trained(values, client.index, number) for client, values in held.items()}
            for client in (p0, p1):
                client.upload(number, sent[client])
            held = {client: client.fetch(number, sent[client]).values for client in (p0, p1)}
    assert digest(held[p0]) == digest(held[p1])
    return digest(held[p0])


def test_peers_of_three_shards_have_the_bits_of_one_server(make_service: MakeService):
    found = []
    for count in (1, 3):
        cluster = Cluster(make_service(RUNS), count)
        cluster.start_all()
        peers = [
            cluster.service.peer(
                f"{run}{index}",
                ROUNDS,
                run=run,
                seed=7,
                codec="int8" if run == "coded" else "fp32",
                options={"index": index},
            )
            for run in ("guarded", "coded")
            for index in range(2)
        ]
        last = train_experts(cluster.service)
        assert [peer.wait() for peer in peers] == [0] * 4, [peer.output for peer in peers]
        digests = {run: cluster.digests(run) for run in RUNS}
        for run in ("guarded", "coded"):
            for index in range(2):
                seen = cluster.service.seen(f"{run}{index}")
                assert [seen[number]["digest"] for number in range(ROUNDS + 1)] == digests[run]
        # Whoever comes first publishes the start.
        figures = [
            (event["norms"], event.get("merged"))
            for run in RUNS
            for event in cluster.service.journal(run)
            if event["event"] == "committed" and event["round"] > 0
        ]
        found.append((digests, last, figures))
    assert found[0] == found[1]
    # And every server had something of everything.
    for number in range(3):
        folder = cluster.service.state / (f"shard-{number}" if number else "") / "runs"
        assert all(len(list((folder / run / "snapshots").iterdir())) == 2 for run in RUNS)


def test_other_servers_are_told_all_that_values_are_made_by():
    learned = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=3, pseudo_gradnorm_reduce=True)
    norms = torch.tensor([[0.1, 1.0], [0.3, 2000.0], [0.2, 1500.0]], dtype=torch.float64)
    one, other = Penalty(learned, workers=3, units=2).decide(norms)
    decision = Decision(
        rejected={"p1": "is non-finite"},
        verdicts={("layer.0", False): one, ("layer.0", True): other},
        coefficients={("layer.0", False): 1 / 3, ("layer.1", False): 2.5},
    )
    job = RoundJob(number=3, uploaders=(), outer_scalars={"step": 1 / 3})
    assert read_work(work_message(job, decision), "write") == Work(job=job, decision=decision)
    assert read_work(work_message(job, None), "measure") == Work(job=job, decision=None)


@pytest.mark.parametrize(
    ("victim", "failpoint"),
    [
        (1, "upload_checked:3"),
        (1, "snapshot_written:3"),
        (2, "snapshot_renamed:3"),
        (0, "snapshot_renamed:3"),
        (0, "round_committed:3"),
    ],
)
def test_whichever_server_is_killed_a_round_is_committed_on_all_or_on_none(
    make_service: MakeService, undisturbed: list[str], victim: int, failpoint: str
):
    service = make_service(outer_optimizer="sgd", outer_optimizer_lr=0.7)
    cluster = Cluster(service, 3)
    cluster.start_all({victim: failpoint})
    peers = [service.peer(f"p{index}", ROUNDS, options={"index": index}, seed=7) for index in range(2)]
    assert cluster.servers[victim].wait() == -signal.SIGKILL
    before = cluster.digests("demo")
    cluster.start(victim)
    assert [peer.wait() for peer in peers] == [0, 0], [peer.output for peer in peers]
    after = cluster.digests("demo")
    assert after == undisturbed and after[: len(before)] == before
    for index in range(2):
        assert [service.seen(f"p{index}")[number]["digest"] for number in range(ROUNDS + 1)] == undisturbed


def refusal(service: Service, patience: float = 20.0) -> str:
    """Return what a peer is told that registers."""
    start = start_values(1)
    config = ConnectionConfig(server=service.address, patience_seconds=patience)
    with (
        SyncClient(ClientConfig(connection=config, run="demo", peer="p0"), start) as client,
        pytest.raises(UserError) as refused,
    ):
        client.start(start)
    return str(refused.value)


def test_a_shard_that_is_missing_or_has_another_list_is_named_to_everybody(
    make_service: MakeService, capsys: pytest.CaptureFixture[str]
):
    service = make_service()
    cluster = Cluster(service, 3)
    cluster.start(1)
    service.server = cluster.start(0)
    until(lambda: all(word in service.output for word in ("shard 1 at", "does not answer")), "the first server's words")
    assert f"shard 2 at {cluster.addresses[2]} does not answer" in refusal(service, patience=0.5)
    assert main(["server", "status", "--server", service.address]) == 0
    assert f"PROBLEM: shard 2 at {cluster.addresses[2]} does not answer" in capsys.readouterr().out
    other = [cluster.addresses[0], "127.0.0.1:1", cluster.addresses[2]]
    cluster.start(2, shards=other)
    told = f"shard 2 at {cluster.addresses[2]}: its shards are {', '.join(other)}, and those of the first server"
    until(lambda: told in cluster.servers[0].output, "the first server's complaint")
    assert told in refusal(service)
    # Asked by a peer itself, it says where to go.
    service.address = cluster.addresses[1]
    assert f"this is shard 1, which has a part of the values; ask the first server, at {cluster.addresses[0]}" in (
        refusal(service)
    )


def test_a_peer_is_told_that_the_values_of_a_shard_are_damaged_and_continues_once_they_are_restored(
    make_service: MakeService,
):
    service = make_service()
    cluster = Cluster(service, 2)
    cluster.start_all({1: "upload_checked:2"})
    start = start_values(7)
    told = "its folder lacks values of run 'demo', or they are damaged"
    with (
        service.client("p0", start, index=0, connection={"patience_seconds": 8, "call_seconds": 6}) as p0,
        service.client("p1", start, index=1) as p1,
        ThreadPoolExecutor(1) as pool,
    ):
        held = {client: client.start(start) for client in (p0, p1)}
        sent = {client: trained(values, client.index, 1) for client, values in held.items()}
        upload = pool.submit(p0.upload, 1, sent[p0])
        assert cluster.servers[1].wait() == -signal.SIGKILL
        (snapshot,) = (service.state / "shard-1" / "runs" / "demo" / "snapshots").iterdir()
        whole = snapshot.read_bytes()
        snapshot.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        cluster.start(1)
        until(lambda: told in cluster.servers[0].output, "the first server's words")
        with pytest.raises(UserError, match=f"has not answered Commit .*shard 1 at .*{told}.*restore it from a copy"):
            upload.result()
        with pytest.raises(UserError, match=f"has not answered Upload .*shard 1 cannot follow the first .*{told}"):
            p0.upload(1, sent[p0])
        cluster.servers[1].kill()
        # It was asked every second; the first server's log has it once as well.
        assert [server.output.count(told) for server in (cluster.servers[1], cluster.servers[0])] == [1, 1]
        snapshot.write_bytes(whole)
        cluster.start(1)
        for client in (p0, p1):
            client.upload(1, sent[client])
        assert digest(p0.fetch(1, sent[p0]).values) == digest(p1.fetch(1, sent[p1]).values)


class Shard1:
    """Shard 1 of 2 in this process, and what the first server tells it."""

    def __init__(self, folder: Path, catalog: Catalog = CATALOG, **run: Any) -> None:
        self.folder = folder
        self.catalog = catalog
        self.config = RunConfig(peers=2, **run)
        server = ServerConfig(dir=str(folder), shards=("a:1", "b:1"), shard=1, runs={"demo": self.config})
        self.run = ShardRun("demo", server, folder, Failpoints())

    def follow(self, **changes: Any) -> Followed:
        told = word(["a:1", "b:1"], self.config, self.catalog, **changes)
        return read_followed(self.run.answer(shard_request("follow", told)).follow, "follow")

    def upload(self, peer: str, instance: str, number: int = 0, *, closed: bool = False) -> None:
        """Upload everything, by default of the start."""
        frames = [
            Frame.make(spec.name, spec.shape, whole_box(spec.shape), 0, torch.ones(spec.numel))
            for spec in self.catalog
        ]
        asyncio.run(self.run.hear(peer, instance, number))  # as the server does with every call
        assert self.run.upload(peer, instance, number, frames) == (closed, 0 if closed else len(frames), 0)

    def lacks(self, instance: str) -> str | None:
        """Return what the contribution of peer p lacks for a process."""
        wanted = {"peer": "p", "instance": instance, "index": 0, "round": 0}
        return read_sealed(self.run.answer(shard_request("seal", wanted)).seal, "seal").missing


def test_what_a_shard_was_asked_to_keep_outlives_it_and_is_not_another_process_s(tmp_path: Path):
    shard = Shard1(tmp_path)
    shard.follow(members={"p": "old"})
    shard.upload("p", "old")
    again = Shard1(tmp_path)
    again.follow(members={"p": "old"})
    # Nobody had asked for it: what had arrived may be cut off.
    assert "0 of the 240 elements" in (again.lacks("old") or "")
    again.upload("p", "old")
    assert again.lacks("old") is None
    third = Shard1(tmp_path)
    third.follow(members={"p": "old"})
    assert third.lacks("old") is None
    # The first server counts it: it stays, whoever speaks for the peer by now.
    third.follow(members={"p": "new"}, kept={"p": 0})
    assert third.lacks("new") is None
    third.follow(members={"p": "other"})
    assert "0 of the 240 elements" in (third.lacks("other") or "")
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(third.upload, "p", "old")
        until(lambda: refused.running(), "the upload")
        while not refused.done():
            third.follow(members={"p": "other"})
            time.sleep(0.01)
    with pytest.raises(Refusal, match="peer 'p' is not a member of the run, or another process has registered as it"):
        refused.result()


def test_what_a_shard_has_made_may_be_committed_after_it_was_killed_and_started_again(tmp_path: Path):
    shard = Shard1(tmp_path)
    shard.follow(members={"p": "old"})
    shard.upload("p", "old")
    assert shard.lacks("old") is None
    job = RoundJob(number=0, uploaders=(Uploader(peer="p", index=0, made_for=0),), outer_scalars={})
    shard.run.answer(shard_request("write", work_message(job, Decision())))
    again = Shard1(tmp_path)
    # The first server still waits for other shards.
    again.follow(members={"p": "old"}, kept={"p": 0})
    again.follow(members={"p": "old"}, open_round=1)
    with again.run.snapshot("p", "old", 0) as (snapshot, catalog):
        assert all(torch.equal(snapshot.read(spec.name), torch.ones(spec.numel)) for spec in catalog)


def test_a_shard_takes_what_was_used_or_has_become_too_old_no_second_time(tmp_path: Path):
    catalog = Catalog([TensorSpec(name="norm", shape=(8,))])
    shard = Shard1(tmp_path, catalog, rounds="asynchronous", max_staleness=1)
    members = {"p": "a", "q": "b"}

    def make(number: int, peer: str, made_for: int, **told: Any) -> None:
        uploaders = (Uploader(peer=peer, index=0, made_for=made_for),)
        job = RoundJob(number=number, uploaders=uploaders, outer_scalars={})
        shard.run.answer(shard_request("write", work_message(job, Decision())))
        shard.follow(members=members, open_round=number + 1, **told)

    shard.follow(members=members)
    shard.upload("p", "a")
    make(0, "p", 0)
    for peer, instance in members.items():
        shard.upload(peer, instance, 1)
    shard.follow(members=members, open_round=1, kept={"p": 1})
    # The one is to be used next, whoever comes with it again; its process may not be ahead of it.
    assert sorted(shard.run._shard.spool.nbytes) == ["p", "q"]
    make(1, "p", 1, used={"p": 1})
    assert list(shard.run._shard.spool.nbytes) == ["q"]
    shard.upload("p", "a", 1, closed=True)
    shard.upload("p", "a", 2)
    shard.follow(members=members, open_round=2, used={"p": 1}, kept={"p": 2})
    with pytest.raises(Refusal, match="what peer 'p' has contributed before is not used yet") as refused:
        shard.upload("p", "a", 1)
    assert refused.value.reason == "later"
    make(2, "p", 2, used={"p": 2})
    # Two rounds were made since the values that the other one started from.
    assert not shard.run._shard.spool.nbytes and not list((tmp_path / "spool").iterdir())
    shard.upload("q", "b", 1, closed=True)
    shard.upload("q", "b", 2)


def test_a_shard_that_cannot_follow_says_so_in_its_own_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shard = Shard1(tmp_path)
    for _ in range(2):
        # Started again it is told without the catalog first, each time, and asks for it.
        assert shard.follow(open_round=3, catalog=None).wants_catalog
        with pytest.raises(Refusal):
            shard.follow(open_round=3)
    (said,) = [line.getMessage() for line in caplog.records]
    assert said.startswith("run demo: cannot follow the first server: its folder lacks values of run 'demo'")
    shard.follow()
    with pytest.raises(Refusal):
        shard.follow(open_round=3)
    assert len(caplog.records) == 2


def test_a_shard_follows_its_own_run_alone(tmp_path: Path):
    with pytest.raises(Refusal, match="run 'demo': outer_optimizer is 'sgd' there, and 'none' at the first server"):
        Shard1(tmp_path, outer_optimizer="sgd").follow(config=asdict(RunConfig(peers=2)))
    shard = Shard1(tmp_path)
    with pytest.raises(Refusal, match="it was started with --shard 1"):
        shard.follow(shard=0)
    with pytest.raises(Refusal, match="its folder lacks values of run 'demo'"):
        shard.follow(open_round=3)
    codecs = dict.fromkeys(CODECS.own_names, "")
    assert shard.follow() == Followed(wants_catalog=False, spooled={}, codecs=codecs)
    again = Shard1(tmp_path)
    with pytest.raises(Refusal, match=r"has shard 1 of 2 of another run 'demo' \(id one; the first server's is two\)"):
        again.follow(id="two")
    (tmp_path / "snapshots" / "round-00000001.safetensors").write_bytes(b"committed elsewhere")
    with pytest.raises(Refusal, match="it has values of round 1 of run 'demo', which the first server does not know"):
        Shard1(tmp_path).follow()


def test_the_first_server_speaks_for_all_and_draining_it_ends_all_behind_tokens_and_mutual_tls(
    make_service: MakeService, tmp_path: Path
):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "secret").write_text("fedcba9876543210")
    files = {"tls_ca": "ca", "tls_cert": "cert", "tls_key": "key", "token_file": "token"}
    files = {name: str(tmp_path / file) for name, file in files.items()}
    flags = [word for name, file in files.items() for word in ("--" + name.replace("_", "-"), file)]
    service = make_service(quorum=1, grace_seconds=0.0)
    secret = str(tmp_path / "secret")
    cluster = Cluster(service, 2, **files, tls_client_ca=files["tls_ca"], shard_secret_file=secret)
    cluster.start_all()
    start = start_values(1)
    with (
        service.client("p0", start, connection=files) as p0,
        service.client("p1", start, connection=files) as p1,
    ):
        for client in (p0, p1):
            client.start(start)
        p0.upload(1, start)
        assert p0.fetch(1, start).contributors == ("p0",)
        assert service.events("uploaded")[1]["bytes"] > sum(4 * value.numel() for value in start.values())
        to_first = ["--server", cluster.addresses[0], *flags]
        assert main(["server", "evict", "p1", *to_first]) == 0
        with pytest.raises(UserError, match="was evicted: no reason was given"):
            p1.fetch(2, start)
        assert main(["server", "drain", *to_first]) == 0
        assert [cluster.servers[number].wait() for number in range(2)] == [0, 0]


def test_another_number_of_shards_than_the_run_began_with_is_refused(tmp_path: Path):
    store = RunStore("r", RunConfig(peers=1), tmp_path, 2, shards=2)
    catalog = Catalog(TensorSpec(name=name, shape=(4,)) for name in "abc")
    store.create({"codec": "fp32"}, catalog)
    split = store.shard_of
    store.close()
    again = RunStore("r", RunConfig(peers=1), tmp_path, 2, shards=2)
    assert again.shard_of == split and set(split) == {0, 1}
    again.close()
    with pytest.raises(UserError, match="there are 3 shards, but the run was started with 2"):
        RunStore("r", RunConfig(peers=1), tmp_path, 2, shards=3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shards": ["a:1"]}, "shards are a:1; give 2 or more"),
        ({"shards": ["a:1", "a:1"]}, "give 2 or more, each once"),
        ({"shards": ["a:1", "b"]}, "shards: 'b' is not an address"),
        ({"shards": ["a:1", "b:1"], "shard": 2}, "shard is 2; it must be 0 to 1"),
        ({"shard": 1}, "shard is 1, and there are no shards"),
    ],
)
def test_shards_that_cannot_be_are_refused(changes: dict[str, Any], problem: str):
    config = ServerConfig(**{"dir": "x", "runs": {"r": RunConfig(peers=2)}, **changes})
    with pytest.raises(UserError) as refused:
        config.check()
    assert problem in str(refused.value)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9)), min_size=1, max_size=40), shards=st.integers(2, 4)
)
@settings(max_examples=50, deadline=None)
def test_units_stay_whole_and_no_shard_has_more_than_its_part_and_the_largest_unit(
    sizes: list[tuple[int, int]], shards: int
):
    catalog = Catalog(
        TensorSpec(name=f"t{number}", shape=(size,), unit=f"u{unit}") for number, (size, unit) in enumerate(sizes)
    )
    by_unit: dict[str, int] = {}
    for spec in catalog:
        by_unit[spec.unit] = by_unit.get(spec.unit, 0) + spec.numel
    if len(by_unit) < shards:
        with pytest.raises(Refusal, match=f"the model has {len(by_unit)} unit"):
            assign(catalog, shards)
        return
    found = assign(catalog, shards)
    assert len({(spec.unit, shard) for spec, shard in zip(catalog, found, strict=True)}) == len(by_unit)
    loads = [sum(s.numel for s, place in zip(catalog, found, strict=True) if place == shard) for shard in range(shards)]
    assert min(loads) > 0 and max(loads) <= sum(loads) / shards + max(by_unit.values())


def test_experts_of_a_layer_are_on_one_shard_whatever_their_units():
    found = dict(zip((spec.name for spec in CATALOG), assign(CATALOG, 4), strict=True))
    for layer in range(2):
        assert len({shard for name, shard in found.items() if f"layers.{layer}.mlp.experts" in name}) == 1
    assert set(found.values()) == {0, 1, 2, 3}
