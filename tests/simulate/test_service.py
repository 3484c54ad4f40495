# SPDX-License-Identifier: Apache-2.0
"""Simulated runs at a sync service, in figures that can be checked by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_ext.errors import UserError
from megatron_ext.simulate.model_units import equal_layers
from megatron_ext.simulate.service_setup import ServiceSetup
from megatron_ext.simulate.simulated_peers import SimulatedPeers, SimulatedServer
from megatron_ext.simulate.training_work import SimulatedTraining
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig


def setup_of(
    *,
    peers: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    steps: int = 1000,
    layers: int = 1,
    **service: Any,
) -> ServiceSetup:
    """Return 4 peers with a billion parameters, 4 GB: 32 s up, 32 s down, 8 s to reduce each; a step of 1 s."""
    whole = {"peers": 4, "bandwidth": 1.0, "latency": 0.0, **(peers or {})}
    found = ServiceSetup(
        peers=SimulatedPeers(**whole),
        server=SimulatedServer(**{"server_bandwidth": 100.0, "reduction": 500.0, **(server or {})}),
        training=SimulatedTraining(steps=steps, step_seconds=1.0),
        units=equal_layers(10**9, layers),
        service=SyncServiceConfig(
            sync_service="localhost:50051",
            sync_service_run="simulated",
            sync_service_peer="peer",
            sync_service_peers=whole["peers"],
            **({"sync_service_interval": 100} if "sync_service_interval_seconds" not in service else {}),
            **service,
        ),
    )
    found.check()
    return found


def test_a_round_is_upload_reduction_and_download():
    run = setup_of().run()
    assert (run.rounds, run.worker_steps) == (10, 4000)
    assert run.seconds == pytest.approx(10 * (100 + 32 + 32) + 9 * 32)  # the last one's values are not taken
    assert run.time["reducing"] == pytest.approx(10 * 32)
    assert run.time["sending"] == pytest.approx(19 * 32)
    assert run.worker_bytes == pytest.approx(10 * 4e9)


def test_peers_share_the_servers_link():
    run = setup_of(server={"server_bandwidth": 2.0}).run()
    assert run.time["sending"] == pytest.approx(19 * 64)
    bf16 = setup_of(server={"server_bandwidth": 2.0}, sync_service_codec="bf16").run()
    assert bf16.time["sending"] == pytest.approx(19 * 32)


def test_a_round_takes_six_messages_one_after_the_other_beside_its_values():
    run = setup_of(peers={"latency": 500.0}).run()
    # First value, receipt, the word that all is there; the answer, the request, first value of the last round but one.
    assert run.seconds == pytest.approx(10 * (100 + 32 + 32) + 9 * 32 + 0.5 * (10 * 3 + 9 * 3))


def test_several_servers_have_a_part_of_the_values_each_and_the_largest_one_counts():
    # Three units of equal size at two servers: one has two of them.
    of_two = {"shards": 2, "server_bandwidth": 2.0}
    run = setup_of(layers=3, server=of_two).run()
    assert run.time["sending"] == pytest.approx(19 * 64 * 2 / 3)
    assert run.time["reducing"] == pytest.approx(10 * 32 * 2 / 3)
    # Where a peer's own link is the narrow one, they change nothing about it.
    run = setup_of(layers=3, server={"shards": 2}).run()
    assert run.time["sending"] == pytest.approx(19 * 32)
    # To measure and to write, the first one asks the other, which answers.
    late, one = (setup_of(layers=3, peers={"latency": 250.0}, server={"shards": n}).run() for n in (3, 1))
    assert late.time["reducing"] == pytest.approx(one.time["reducing"] / 3 + 10 * 4 * 0.25)


def test_more_servers_than_units_are_refused_as_the_server_does():
    with pytest.raises(UserError, match=r"--shards is 4: the model has 3 units .* give fewer shards"):
        setup_of(layers=3, server={"shards": 4})


def test_a_delay_hides_a_round():
    run = setup_of(sync_service_delay=50).run()
    # Of 96 s, 50 are hidden.
    assert run.seconds == pytest.approx(10 * 100 + 9 * 46 + 64, abs=1)
    assert setup_of(sync_service_delay=99).run().utilisation > 0.9


def test_a_quorum_closes_a_round_after_the_grace_window_and_who_was_late_has_lost_an_interval():
    slow = {"slow_peers": 1, "slow_factor": 1.5}
    waiting = setup_of(peers=slow).run()
    assert waiting.time["waiting"] == pytest.approx(10 * 50 * 3 / 4)
    assert waiting.time["lost"] == 0
    run = setup_of(peers=slow, server={"quorum": 3, "grace_seconds": 10.0}).run()
    # Three have uploaded after 132 s, the round closes at 142, is made at 166, and taken at 198 by all. The slow one,
    # which finds it closed at 150, is awaited again.
    assert run.rounds == 14
    assert run.seconds == pytest.approx(13 * 198 + 166)
    assert run.time["waiting"] == pytest.approx(14 * (3 * 10 + 16) / 4)
    assert run.time["lost"] == pytest.approx(14 * 150 / 4)
    patient = setup_of(peers=slow, server={"quorum": 3, "grace_seconds": 60.0}).run()
    assert patient.time["lost"] == 0


def test_an_upload_ends_when_its_round_closes():
    slow = {"slow_peers": 1, "slow_factor": 1.25}
    run = setup_of(peers=slow, server={"quorum": 3, "grace_seconds": 10.0}).run()
    # It is uploading from 125 to 142.
    assert run.time["sending"] == pytest.approx((14 * (3 * 32 + 17) + 13 * 4 * 32) / 4)


def test_asynchronous_peers_wait_for_nobody():
    slow = {"slow_peers": 2, "slow_factor": 2.0}
    together = setup_of(peers=slow).run()
    run = setup_of(peers=slow, server={"rounds": "asynchronous"}).run()
    assert run.rounds == 40
    assert run.time["waiting"] < 0.1 * run.seconds
    assert run.worker_steps / run.seconds > 1.2 * together.worker_steps / together.seconds
    stale = setup_of(peers=slow, server={"rounds": "asynchronous", "max_staleness": 1}).run()
    assert stale.time["lost"] > run.time["lost"]
    assert run.too_late == 0
    made = 40 / (1 - stale.too_late)
    assert made == pytest.approx(round(made)) and made > 40
    # Each was an interval of 100 s or more, of one of four peers.
    assert stale.time["lost"] >= 100 * (made - 40) / 4


def test_a_run_of_no_whole_number_of_intervals_says_how_many_steps_it_makes():
    setup = setup_of(steps=150)
    run = setup.run()
    assert run.worker_steps == 4 * 200
    (said,) = setup.advice(run)
    assert said == (
        "150 steps are not whole intervals of 100: the run ends with round 2, after 200 steps of a peer that loses none"
    )
    whole = setup_of(steps=200)
    assert whole.advice(whole.run()) == []


def test_a_run_whose_contributions_come_too_late_says_what_to_change_and_ends(monkeypatch):
    of_eight = {"peers": 8, "jitter": 0.1}
    setup = setup_of(peers=of_eight, server={"rounds": "asynchronous", "max_staleness": 1})
    run = setup.run()
    assert run.too_late > 0.5
    (said,) = setup.advice(run)
    assert said.startswith(f"{run.too_late:.0%} of the contributions come too late") and "--max-staleness" in said
    # With room for what the others contribute meanwhile all count, and nothing is said.
    roomy = setup_of(peers=of_eight, server={"rounds": "asynchronous", "max_staleness": 14})
    assert roomy.advice(roomy.run()) == []
    monkeypatch.setattr("megatron_ext.simulate.service_run.MOST_EVENTS", 100)
    with pytest.raises(UserError, match=r"more than 100 contributions, of which [0-9]+% come too late to count; give"):
        setup.run()


def test_rounds_by_time_let_slow_peers_make_fewer_steps():
    slow = {"slow_peers": 2, "slow_factor": 2.0}
    run = setup_of(peers=slow, sync_service_interval_seconds=100.0).run()
    assert run.time["waiting"] == pytest.approx(0.0, abs=1)
    # 100 and 50 steps in the same 100 s.
    assert run.worker_steps == 14 * 300


def test_a_failure_costs_a_peer_its_interval_and_the_others_the_wait():
    failing = {"mtbf_hours": 1.0, "restart_seconds": 60.0}
    run = setup_of(peers=failing, steps=3000).run()
    assert run == setup_of(peers=failing, steps=3000).run()
    assert run.failures > 3
    assert run.worker_steps == 12_000
    assert run.time["training"] == pytest.approx(3000)
    assert run.time["restarting"] == pytest.approx(60 * run.failures / 4)
    # An interval of at most 100 s each.
    assert 0 < run.time["lost"] * 4 / run.failures <= 100
    assert run.time["waiting"] > 0


def test_a_round_waits_for_a_failed_peer_until_its_heartbeats_have_failed_to_come():
    peers = {"peers": 8, "mtbf_hours": 4.0, "restart_seconds": 3000.0, "seed": 1}
    server = {"quorum": 4, "grace_seconds": 200.0}
    waits = [
        setup_of(peers=peers, server=server, steps=3000, sync_service_heartbeat_seconds=seconds).run().time["waiting"]
        for seconds in (1.0, 20.0, 0.0)
    ]
    # Without heartbeats a round waits for as long as its grace window says.
    assert waits[0] < 0.8 * waits[1] and waits[1] < 0.8 * waits[2]


def test_an_asynchronous_peer_resumes_its_interval_while_the_server_keeps_the_values_that_it_began_with():
    peers = {"mtbf_hours": 0.2, "restart_seconds": 60.0}
    few, many = (
        setup_of(peers=peers, server={"rounds": "asynchronous", "keep_snapshots": kept}, steps=3000).run()
        for kept in (1, 100)
    )
    assert few.failures > 10 and many.failures > 10
    # Values that are gone have to be replaced by the newest ones.
    assert few.time["sending"] > many.time["sending"]


def test_a_thousand_peers_are_simulated():
    peers = {"peers": 1000, "jitter": 0.1, "mtbf_hours": 20.0, "slow_peers": 50, "slow_factor": 1.5}
    run = setup_of(peers=peers, server={"quorum": 900, "grace_seconds": 10.0, "reduction": 1e5}).run()
    assert run.worker_steps >= 1_000_000
    assert run.failures > 10
    assert sum(run.time.values()) == pytest.approx(run.seconds)


@settings(max_examples=60, deadline=None)
@given(
    delay=some.sampled_from([0, 1, 50, 99]),
    jitter=some.sampled_from([0.0, 0.3]),
    mtbf=some.sampled_from([0.0, 0.5]),
    quorum=some.sampled_from([None, 2]),
    rounds=some.sampled_from(["synchronous", "asynchronous"]),
    seed=some.integers(0, 100),
)
def test_every_second_of_a_peer_has_one_cause(delay, jitter, mtbf, quorum, rounds, seed):
    failing = {"mtbf_hours": mtbf, "restart_seconds": 40.0} if mtbf else {}
    run = setup_of(
        peers={"jitter": jitter, "speed_spread": jitter, "seed": seed, **failing},
        server={"rounds": rounds, **({"quorum": quorum} if rounds == "synchronous" and quorum else {})},
        sync_service_delay=delay,
    ).run()
    assert sum(run.time.values()) == pytest.approx(run.seconds)
    assert min(run.time.values()) >= -1e-6
    assert run.worker_steps >= 4000
