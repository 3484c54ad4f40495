# SPDX-License-Identifier: Apache-2.0
"""A peer with a checkpoint older than its last contributions makes no step twice, and ends with the others."""

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_ext.sync_service.protocol.report import Progress, Report
from megatron_ext.sync_service.protocol.resuming import Claim
from tests.support.every_run import one_of_each
from tests.support.presets import Options
from tests.support.pretrain import Before, run_pretrain
from tests.support.waiting import until
from tests.sync_service.jobs import (
    ALONE,
    SINGLE,
    Kind,
    die_in_step,
    failing_job,
    job_arguments,
    model_of,
    remember_samples,
    run_job,
    same_bits,
    samples_of,
    start_job,
)
from tests.sync_service.megatron.test_switching_peers import strategies
from tests.sync_service.megatron.test_workers import WORKERS
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
START = {"w": torch.zeros(3000)}


def moved(values: dict[str, torch.Tensor], by: float | torch.Tensor) -> dict[str, torch.Tensor]:
    """Return values after an interval."""
    return {name: value + by for name, value in values.items()}


def lose_contributions(service: Service) -> None:
    """Let the server die with what it has of contributions, and start it again."""
    assert service.server is not None
    service.server.kill()
    service.server.wait()
    for frames in (service.state / "runs/demo/spool").rglob("*.frames"):
        frames.unlink()
    service.start()


@pytest.mark.parametrize(
    ("kind", "codec"),
    one_of_each([(SINGLE, "fp32"), (("moe-ep2", "bf16-distopt", 2), "int8")], {1}),
    ids=["one rank", "two ranks, int8"],
)
def test_a_peer_with_an_old_checkpoint_resumes_beside_the_others(
    make_service: MakeService, tmp_path: Path, kind: Kind, codec: str
):
    service = make_service()
    service.start()
    options = {
        "train_iters": 12,
        "sync_service_interval": 2,
        "sync_service_codec": codec,
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "log_interval": 1,
    }
    lasting = start_job(service, "a", kind, sync_service_index=0, **options)
    folder = {"save": str(tmp_path / "b"), "sync_service_index": 1, **options}
    # Saved in the middle of the third interval, and killed in that of the fifth.
    failing_job(service, "b", kind, before=die_in_step(9), save_interval=5, **folder)
    again = run_job(service, "b", kind, load=str(tmp_path / "b"), save_interval=100, before=remember_samples, **folder)
    (said,) = re.findall(r"resumes at iteration (\d+), because (\d+) steps", "".join(rank.stdout for rank in again))
    assert said == ("8", "3")
    assert "1 of 2 of the samples, 0 steps after round 4" in again[0].stdout
    assert [step.iteration for step in again[0].record.steps] == list(range(9, 13))
    # Part 1 of what the last four steps of four samples read.
    assert samples_of(again) == list(range(65, 96, 2))
    ended = lasting.result()
    assert same_bits(model_of(ended), model_of(again))
    rates = [re.findall(r"learning rate: (\S+)", job[-1].stdout)[-4:] for job in (ended, again)]
    assert len(set(rates[0])) == 4 and rates[0] == rates[1]
    (last,) = [event for event in service.events("committed") if event["round"] == 6]
    assert last["contributors"] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "run", "equal"),
    one_of_each(
        [
            (WORKERS, {}, True),
            (strategies("2,1,1", "1,2,1", buckets=(32, 12, 0)), {}, True),
            ({"sync_service_delay": 1}, {"rounds": "asynchronous"}, False),
        ],
        {0, 2},
    ),
    ids=["workers inside", "hot switching", "asynchronous rounds, delayed"],
)
def test_it_does_so_in_every_kind_of_peer(
    make_service: MakeService, tmp_path: Path, options: Options, run: dict[str, str], equal: bool
):
    service = make_service(**run)
    service.start()
    kind = ("single", "fp32", 2)
    options = {**options, "train_iters": 12, "sync_service_interval": 2}
    lasting = start_job(service, "a", kind, sync_service_index=0, **options)
    folder = {"save": str(tmp_path / "b"), "sync_service_index": 1, **options}
    failing_job(service, "b", kind, before=die_in_step(9), save_interval=5, **folder)
    again = run_job(service, "b", kind, load=str(tmp_path / "b"), save_interval=100, **folder)
    assert [step.iteration for step in again[0].record.steps] == list(range(9, 13))
    assert same_bits(model_of(lasting.result()), model_of(again)) == equal


def break_in_step(iteration: int, before: Before) -> None:
    """Make weights non-finite when this many iterations are done."""
    from megatron.training import training

    before()
    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, *rest, **kwargs):
        result = original(forward_step_func, data_iterator, model, *rest, **kwargs)
        if kwargs["iteration"] + 1 == iteration:
            next(model[0].parameters()).data.fill_(torch.nan)
        return result

    training.train_step = train_step


@pytest.mark.parametrize("loads", [True, False], ids=["a checkpoint", "none"])
def test_steps_that_did_not_count_before_some_that_did_are_not_made_in_their_place(
    make_service: MakeService, tmp_path: Path, loads: bool
):
    service = make_service()
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    lasting = start_job(service, "a", SINGLE, sync_service_index=0, **options)
    folder: Options = {"sync_service_index": 1, **options, **({"save": str(tmp_path)} if loads else {})}
    # The third interval, in which it saves, does not count, and the fourth one does.
    diverging = partial(break_in_step, 6, die_in_step(9))
    failing_job(service, "b", SINGLE, before=diverging, save_interval=5, **folder)
    if loads:
        folder["load"] = str(tmp_path)
    again = run_job(service, "b", SINGLE, save_interval=100, before=remember_samples, **folder)
    steps = "3 steps" if loads else "8 steps"
    assert f"resumes at iteration 8, because {steps}" in again[0].stdout
    assert samples_of(again) == list(range(65, 96, 2))
    assert same_bits(model_of(lasting.result()), model_of(again))
    counted = {event["round"]: event["contributors"] for event in service.events("committed")}
    assert counted[3] == ["a"] and all("b" in counted[number] for number in (1, 2, 4, 5, 6))


def test_steps_of_a_checkpoint_that_no_round_has_taken_are_made_again(make_service: MakeService, tmp_path: Path):
    service = make_service()
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    lasting = start_job(service, "a", SINGLE, sync_service_index=0, **options)
    folder = {"save": str(tmp_path), "sync_service_index": 1, **options}
    failing_job(service, "b", SINGLE, before=die_in_step(5), save_interval=5, **folder)
    # It takes the newest round, and nothing of where the peer was.
    fresh: Options = {"load": str(tmp_path), "no_load_optim": True, "save_interval": 100}
    again = run_job(service, "b", SINGLE, before=remember_samples, **{**folder, **fresh})
    assert "resumes at iteration 4, because what this peer had made after it, up to iteration 5," in again[0].stdout
    assert samples_of(again) == list(range(33, 96, 2))
    assert same_bits(model_of(lasting.result()), model_of(again))


@pytest.mark.parametrize(
    "begins_with", one_of_each(["nothing", "a stock checkpoint", "weights of its own"], {0, 1})
)
def test_it_does_so_without_a_state_of_its_own_too(make_service: MakeService, tmp_path: Path, begins_with: str):
    service = make_service()
    service.start()
    options: Options = {"train_iters": 12, "sync_service_interval": 2}
    if begins_with == "a stock checkpoint":
        # It has read as many samples as both peers do in four steps.
        stock = {**ALONE, "global_batch_size": 8, "train_iters": 12, "save": str(tmp_path), "exit_interval": 4}
        run_pretrain(job_arguments(service, "none", SINGLE, **stock, save_interval=4), 1)
        options = {**options, "load": str(tmp_path)}
    lasting = start_job(service, "a", SINGLE, sync_service_index=0, **options)
    own: Options = {"sync_service_index": 1, **options}
    after: Options = {}
    if begins_with == "weights of its own":
        own = {**own, "save": str(tmp_path)}
        after = {"load": str(tmp_path), "no_load_optim": True}
    failing_job(service, "b", SINGLE, before=die_in_step(9), save_interval=5, **own)
    again = run_job(service, "b", SINGLE, before=remember_samples, save_interval=100, **{**own, **after})
    assert "resumes at iteration 8, because" in again[0].stdout
    assert [step.iteration for step in again[0].record.steps] == list(range(9, 13))
    assert samples_of(again) == list(range(65, 96, 2))
    assert same_bits(model_of(lasting.result()), model_of(again))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_counts_in_the_open_round_is_awaited_and_not_sent_again(make_service: MakeService, codec: str):
    service = make_service()
    service.start()

    def report(number: int) -> Report:
        return Report(steps=10, progress=Progress(10 * number, 40 * number, 4.5 * number))

    with ThreadPoolExecutor(1) as pool, service.client("a", START, codec=codec) as lasting:
        with service.client("b", START, codec=codec) as dying:
            held = pool.submit(lasting.start, START)
            values = dying.start(START)
            held = held.result()
            for number in (1, 2):
                other = pool.submit(lasting.sync, moved(held, 1.0), report(number))
                values = dying.sync(moved(values, 2.0), report(number)).values
                held = other.result().values
                if number == 1:
                    saved, counted = (dying.round, dying.digest), dying.counted
            dying.upload(3, moved(values, 2.0), report(3))
        assert counted == Progress(10, 40, 4.5) and saved[0] == 1
        with service.client("b", START, codec=codec) as again:
            resumed = pool.submit(again.resume, *saved)
            until(lambda: len(service.events("joined")) == 3, "the new process")
            held = lasting.sync(moved(held, 1.0), report(3)).values
            found = resumed.result()
            assert again.round == 3 and not again.uploaded and again.counted == Progress(30, 120, 13.5)
            assert torch.equal(found["w"], held["w"])
            # And it continues as any other.
            other = pool.submit(lasting.sync, moved(held, 1.0), report(4))
            assert again.sync(moved(found, 2.0), report(4)).contributed and other.result().contributed


def test_an_interval_of_other_steps_is_not_made_in_the_place_of_one_in_the_open_round(make_service: MakeService):
    service = make_service()
    service.start()

    for checkpoint in (True, False):
        with ThreadPoolExecutor(1) as pool, service.client("a", START) as lasting, service.client("b", START) as dying:
            held = pool.submit(lasting.start, START)
            values = dying.start(START)
            held = held.result()
            number = dying.round + 1
            saved = dying.round, dying.digest
            dying.upload(number, moved(values, 2.0), Report(progress=Progress(7 * number, 28 * number, 0.0)))
            with service.client("b", START) as again:
                begun = pool.submit(
                    partial(again.resume, *saved, repeats=False)
                    if checkpoint
                    else partial(again.start, START, repeats=False)
                )
                until(lambda: again.index >= 0, "the new process")
                held = lasting.sync(moved(held, 1.0)).values
                assert torch.equal(begun.result()["w"], held["w"])
                assert again.round == number and not again.uploaded
                assert again.counted == Progress(7 * number, 28 * number, 0.0)


def test_a_contribution_that_the_server_has_lost_is_awaited_no_longer(make_service: MakeService):
    service = make_service()
    service.start()
    with ThreadPoolExecutor(1) as pool, service.client("a", START) as lasting, service.client("b", START) as dying:
        held = pool.submit(lasting.start, START)
        values = dying.start(START)
        held = held.result()
        dying.upload(1, moved(values, 2.0), Report(progress=Progress(7, 28, 0.0)))
    lose_contributions(service)
    with service.client("b", START) as again:
        assert torch.equal(again.start(START, repeats=False)["w"], START["w"])
        assert again.round == 0 and not again.uploaded and again.counted is None


def test_a_contribution_that_is_lost_while_it_is_awaited_leaves_the_interval_to_be_made_again(
    make_service: MakeService,
):
    service = make_service(rounds="asynchronous")
    service.start()
    with service.client("b", START, codec="int8") as dying:
        values = dying.start(START)
        assert service.server is not None
        service.server.limit_files(8000)  # room for the contribution, and none for a round's values
        dying.upload(1, moved(values, 2.0), Report(steps=7, progress=Progress(7, 28, 0.0)))
    until(lambda: "cannot be written" in service.output, "the round that cannot be written")
    with ThreadPoolExecutor(1) as pool, service.client("b", START, codec="int8") as again:
        begun = pool.submit(again.resume, 0)
        until(lambda: again.index >= 0, "the new process")
        lose_contributions(service)
        assert begun.result() is None
        assert again.round == 0 and not again.uploaded and again.counted is None
        assert again.sync(moved(values, 2.0), Report(steps=7)).contributed
    assert [event["peer"] for event in service.events("forgotten")] == ["b"]


@pytest.mark.parametrize("rounds", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("whole", one_of_each([True, False], {1}), ids=["a checkpoint", "nothing"])
def test_an_interval_whose_contribution_is_on_record_is_made_again_and_changes_no_bit(
    make_service: MakeService, rounds: str, whole: bool
):
    seen = []
    steps = torch.linspace(0.1, 0.7, 3000)
    for is_killed in (False, True):
        service = make_service(peers=1, rounds=rounds)
        service.start()
        begin, end = Progress(0, 0, 0.0, 4), Progress(2, 8, 8.0, 4)
        with service.client("b", START, codec="int4") as client:
            values = client.start(START)
            if is_killed:
                assert service.server is not None
                service.server.limit_files(8000)  # room for the contribution, and none for a round's values
                client.upload(1, moved(values, steps), Report(steps=2, progress=end))
                claim = Claim(round=0, digest=client.digest, whole=whole, steps=2, begin=begin, now=begin)
                client.close()
                client = service.client("b", START, codec="int4")
                taken = client.begin(claim, {})
                assert (taken is None) == whole and client.uploaded and client.place == (None if whole else begin)
                service.server.limit_files(-1)
            values = client.sync(moved(values, steps), Report(steps=2, progress=end)).values
            assert client.residuals["w"].abs().max() > 0
            seen.append(client.sync(moved(values, steps), Report(steps=2, progress=end.after(2))).values["w"])
            client.close()
        assert [event["round"] for event in service.events("uploaded")] == [0, 1, 2]
    assert torch.equal(*seen)


def test_a_peer_of_asynchronous_rounds_waits_for_what_is_being_made_of_its_contribution(make_service: MakeService):
    service = make_service(rounds="asynchronous")
    service.start()
    with service.client("b", START) as dying:
        values = dying.start(START)
        dying.upload(1, moved(values, 2.0), Report(steps=7, progress=Progress(7, 28, 0.0)))
    with service.client("b", START) as again:
        again.start(START, repeats=False)
        assert again.round == 1 and again.counted == Progress(7, 28, 0.0)


def test_what_is_uploaded_again_for_an_earlier_process_is_reported_too(make_service: MakeService):
    service = make_service()
    service.start()
    report = Report(loss=1.0, steps=7, progress=Progress(7, 28, 0.0, 4))
    with ThreadPoolExecutor(1) as pool, service.client("a", START) as lasting:
        held = pool.submit(lasting.start, START)
        with service.client("b", START) as dying:
            values = dying.start(START)
            saved = dying.round, dying.digest
            dying.upload(1, moved(values, 2.0), report)
        held = held.result()
        with service.client("b", START) as again:
            assert again.resume(*saved) is None and again.uploaded
            lose_contributions(service)
            ours = pool.submit(again.sync, moved(values, 2.0), report)
            lasting.sync(moved(held, 1.0), report)
            assert ours.result().contributed
    events = [event for event in service.events("uploaded") if (event["peer"], event["round"]) == ("b", 1)]
    assert [(event["loss"], event["steps"], event["progress"]) for event in events] == [(1.0, 7, [7, 28, 0.0, 4])] * 2


def test_who_takes_a_peers_place_continues_in_its_part_of_the_samples(make_service: MakeService):
    service = make_service(rounds="asynchronous")
    service.start()
    with service.client("b", START, index=1) as leaving:
        values = leaving.start(START)
        leaving.sync(values, Report(steps=7, progress=Progress(7, 28, 0.0)))
        leaving.leave()
    for name, index, counted in (("c", 1, Progress(7, 28, 0.0)), ("b", 0, None)):
        with service.client(name, START, index=index) as client:
            client.start(START)
            assert (client.index, client.counted) == (index, counted)
