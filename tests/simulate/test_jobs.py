# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs, in figures that can be checked by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.round_cost import WorkerLink, compare
from tests.simulate.setups import setup_of


def test_a_round_takes_what_suggest_says_and_a_delay_hides_what_it_says():
    link = WorkerLink(workers=4, parameters=10**9, step_seconds=2.0, bandwidth=8e9, latency=0.0)
    for codec in ("fp32", "bf16", "int8", "int4", "topk"):
        for cost in compare(link, [10], [codec]):
            setup = setup_of(
                interval=10,
                training={"steps": 1000},
                codec=None if codec == "fp32" else codec,
                streaming={"sync_delay": cost.delay},
            )
            run = setup.run()
            # The last round of a delayed run is of exact values, and nothing hides it.
            assert run.utilisation == pytest.approx(cost.utilisation, rel=0.02), (codec, cost.delay)
            assert run.worker_bytes == pytest.approx(100 * cost.round_bytes, rel=0.12 if cost.delay else 1e-6)


def test_fragments_hide_what_suggest_says():
    link = WorkerLink(workers=4, parameters=10**9, step_seconds=2.0, bandwidth=8e9, latency=0.1)
    halves, quarters = [5 * 10**8] * 2, [25 * 10**7] * 4
    for cost in compare(link, [2, 5, 20], ["fp32", "int8"], [halves, quarters]):
        setup = setup_of(
            interval=cost.interval,
            fleet={"latency": 100.0},
            training={"steps": 4000},
            codec=None if cost.codec == "fp32" else cost.codec,
            streaming={"sync_delay": cost.delay, "fragments": cost.fragments},
        )
        assert setup.run().utilisation == pytest.approx(cost.utilisation, rel=0.01), cost


def test_synchronous_training_waits_for_every_step_and_overlap_hides_part_of_it():
    run = setup_of().baseline()
    # 2 * 3/4 * 2 bytes * 10^9 take 3 s.
    assert (run.time["training"], run.time["sending"], run.seconds) == (200.0, pytest.approx(300.0), pytest.approx(500))
    assert setup_of(fleet={"overlap": 0.5}).baseline().seconds == pytest.approx(400)
    assert setup_of(fleet={"overlap": 1.0, "bandwidth": 100.0}).baseline().seconds == pytest.approx(200)


def test_all_wait_for_a_slow_worker_once_per_round_or_once_per_step():
    fleet = {"slow_workers": 1, "slow_factor": 1.5}
    run, baseline = setup_of(interval=10, fleet=fleet).run(), setup_of(fleet=fleet).baseline()
    for found in (run, baseline):
        assert found.time["training"] == pytest.approx((3 * 200 + 300) / 4)
        assert found.time["waiting"] == pytest.approx(3 * 100 / 4)
    assert run.seconds == pytest.approx(300 + 10 * 6)


def test_steps_that_vary_cost_less_where_workers_meet_seldom():
    fleet = {"jitter": 0.3, "workers": 64}
    often, seldom = (setup_of(interval=interval, fleet=fleet, training={"steps": 1000}).run() for interval in (1, 100))
    baseline = setup_of(fleet=fleet, training={"steps": 1000}).baseline()
    assert often.time["waiting"] == pytest.approx(baseline.time["waiting"], rel=0.05)
    assert seldom.time["waiting"] < 0.2 * often.time["waiting"]
    assert seldom.time["training"] == pytest.approx(2000, rel=0.01)


def test_one_worker_has_rounds_and_sends_nothing():
    for streaming in ({}, {"fragments": 4, "sync_delay": 2}, {"eager": True}):
        run = setup_of(interval=10, streaming=streaming, fleet={"workers": 1, "jitter": 0.3}).run()
        assert run.rounds > 0
        assert (run.utilisation, run.worker_bytes) == (1, 0)
    assert setup_of(fleet={"workers": 1}).baseline().worker_bytes == 0


def test_a_link_between_sites_is_shared_by_their_workers():
    # Each of 2 workers of a site sends half of its message, 1 GB a way, to the other one's site; the ring crosses once.
    sites = {"sites": 2, "site_bandwidth": 8.0, "bandwidth": 1e6}
    run = setup_of(interval=100, fleet=sites).run()
    assert run.time["sending"] == pytest.approx(2 * 4.0, rel=1e-3)
    assert setup_of(fleet=sites).baseline().time["sending"] == pytest.approx(300, rel=1e-3)


def test_fragments_send_one_after_the_other_and_a_delay_is_cut_in_two():
    # A fragment's round takes 2 * 0.75 s, hidden by one step a way.
    hidden = setup_of(interval=8, training={"steps": 800}, streaming={"fragments": 4, "sync_delay": 2}).run()
    assert hidden.time["sending"] == pytest.approx(6.0)  # the mean at the end
    assert hidden.rounds == 99  # the last one's fragment is part of that
    # With a delay of 1 step, it turns at once: the way outward hides nothing.
    half = setup_of(interval=8, training={"steps": 800}, streaming={"fragments": 4, "sync_delay": 1}).run()
    assert half.time["sending"] == pytest.approx(6.0 + 399 * 0.75)


def test_eager_rounds_have_the_whole_interval():
    run = setup_of(interval=10, streaming={"eager": True}).run()
    assert run.utilisation == pytest.approx(200 / 206)
    slow = setup_of(interval=10, streaming={"eager": True}, fleet={"bandwidth": 0.8}).run()
    assert slow.time["sending"] > 9 * (60 - 20)


def test_warm_up_is_synchronous():
    run = setup_of(interval=10, local_sgd_warmup_steps=50).run()
    assert run.seconds == pytest.approx(50 * 5 + 50 * 2 + 5 * 6)
    assert run.worker_bytes == pytest.approx(50 * 3e9 + 5 * 6e9)


def test_own_work_of_a_round_is_counted_once_per_interval():
    for streaming in ({}, {"fragments": 4}, {"fragments": 4, "sync_delay": 3}):
        run = setup_of(interval=10, training={"round_work": 1.0, "steps": 1000}, streaming=streaming).run()
        assert run.time["applying"] == pytest.approx(100, abs=1)


def test_workers_that_meet_by_time_make_steps_at_their_own_speed():
    fleet = {"slow_workers": 2, "slow_factor": 2.0}
    by_time = {"use_async": True, "local_sgd_sync_time": 101.0, "min_total_global_steps": 1}
    run = setup_of(fleet=fleet, training={"steps": 1000}, **by_time).run()
    # 51 steps of 2 s, 26 of 4 s, of which the last begin before the window is over; then 6 s for the round.
    assert run.worker_steps == pytest.approx(4000, abs=4)
    assert run.rounds == 26
    assert run.time["waiting"] == pytest.approx(26 * (104 - 102) / 2, rel=0.1)
    together = setup_of(interval=50, fleet=fleet, training={"steps": 1000}).run()
    assert run.worker_steps / run.seconds > 1.4 * together.worker_steps / together.seconds


def test_checkpoints_that_are_counted_in_rounds_come_after_as_much_training_in_the_baseline():
    fleet = {"save_interval": 5, "save_seconds": 10.0}
    by_time = {"use_async": True, "local_sgd_sync_time": 100.0}
    setup = setup_of(fleet=fleet, training={"steps": 1000}, **by_time)
    setup.check()
    # 2000 s are 20 rounds of 50 steps.
    assert setup.run().time["saving"] == setup.baseline().time["saving"] == 40.0


def test_meetings_with_too_few_steps_make_no_round():
    by_time = {"use_async": True, "local_sgd_sync_time": 9.0, "min_total_global_steps": 50}
    run = setup_of(training={"steps": 1000}, **by_time).run()
    # 5 steps each a meeting; the third makes 60.
    assert run.rounds == pytest.approx(1000 / 15, abs=1)


def test_bytes_are_those_of_the_steps_that_were_made_also_where_a_failure_cuts_an_interval_off():
    fleet = {"mtbf_hours": 4.0, "save_interval": 50, "restart_seconds": 100.0}
    run = setup_of(fleet=fleet, training={"steps": 10_000}).baseline()
    assert run.failures > 1
    # A step is 2 s of training and 3 s in which 3 GB are sent.
    assert run.worker_bytes == pytest.approx(3e9 * (run.seconds - run.time["restarting"]) / 5)


def test_failures_cost_what_was_done_since_the_checkpoint_and_a_seed_repeats_them():
    fleet = {"mtbf_hours": 4.0, "save_interval": 50, "save_seconds": 10.0, "restart_seconds": 100.0}
    setup = setup_of(interval=10, fleet=fleet, training={"steps": 5000})
    run = setup.run()
    assert run == setup.run()
    assert run.failures > 1
    assert run.time["restarting"] == pytest.approx(100 * run.failures)
    assert 0 < run.time["lost"] / run.failures <= 50 * 2 + 5 * 6 + 10
    assert (run.worker_steps, run.rounds) == (20_000, 500)
    assert run.time["training"] == pytest.approx(10_000)
    # An exponential mean of 4 hours for each of 4 GPUs.
    assert run.failures == pytest.approx(run.seconds / 3600, abs=4 * (run.seconds / 3600) ** 0.5)
    fleet["seed"] = 1
    assert setup_of(interval=10, fleet=fleet, training={"steps": 5000}).run() != run


def test_a_run_that_never_reaches_its_checkpoint_is_refused():
    fleet = {"mtbf_hours": 0.01, "save_interval": 100}
    with pytest.raises(UserError, match="does not get from one checkpoint to the next"):
        setup_of(interval=10, fleet=fleet).run()


@settings(max_examples=60, deadline=None)
@given(
    interval=some.integers(1, 20),
    fragments=some.integers(1, 4),
    delay=some.integers(0, 19),
    jitter=some.sampled_from([0.0, 0.2]),
    mtbf=some.sampled_from([0.0, 3.0]),
    method=some.sampled_from(["plain", "streaming", "eager", "by time"]),
)
def test_every_second_of_a_run_has_one_cause(
    interval: int, fragments: int, delay: int, jitter: float, mtbf: float, method: str
):
    fleet = {"jitter": jitter, "speed_spread": jitter, "mtbf_hours": mtbf, "save_interval": 7, "save_seconds": 1.0}
    streaming = {"fragments": fragments, "sync_delay": min(delay, interval - 1)} if method == "streaming" else {}
    by_time = {"use_async": True, "local_sgd_sync_time": 20.0} if method == "by time" else {}
    setup = setup_of(
        interval=1 if by_time else interval,
        fleet=fleet,
        streaming={"eager": True} if method == "eager" else streaming,
        training={"round_work": 0.1},
        **by_time,
    )
    setup.check()
    for run in (setup.run(), setup.baseline()):
        assert sum(run.time.values()) == pytest.approx(run.seconds)
        assert min(run.time.values()) >= 0
        assert run.worker_steps >= 400
