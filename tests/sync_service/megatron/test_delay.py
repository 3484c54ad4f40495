# SPDX-License-Identifier: Apache-2.0
"""Megatron jobs that continue training while their rounds are made: a real server, real toy trainings."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from tests.spes.test_feature import RUN, SPES, expert_of
from tests.support.pretrain import RankOutcome
from tests.support.waiting import until
from tests.sync_service.jobs import (
    SINGLE,
    Kind,
    die_in_step,
    failing_job,
    has_joined,
    model_of,
    run_job,
    same_bits,
    start_job,
    values_held,
)
from tests.sync_service.megatron.test_switching_peers import SWITCHED
from tests.sync_service.service import Service, Zygote, kill_process

MakeService = Callable[..., Service]
Model = dict[str, np.ndarray]
SHARDED: Kind = ("single", "bf16-distopt-overlap", 2)
TWELVE = {"train_iters": 12, "sync_service_interval": 4}
FIRST = {**TWELVE, "sync_service_index": 0, "sync_service_delay": 2, "save_interval": 9}
SECOND = {**TWELVE, "sync_service_index": 1, "sync_service_delay": 1}


def in_steps(act: Callable[..., None]) -> None:
    """Before: call act(when, iteration, model, optimizer) before and after every step; iterations count from 1."""
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(**given):
        which = given["iteration"] + 1, given["model"], given["optimizer"]
        act("before", *which)
        result = original(**given)
        act("after", *which)
        return result

    training.train_step = train_step


def remember(when, iteration, model, optimizer) -> None:
    """Keep the authoritative values and what is frozen, as `values_held` says them."""
    from megatron.training import get_args

    from megatron_ext.params import ParameterView, global_views
    from megatron_ext.seams.optimizer import InnerValues

    view, boxes = ParameterView.from_model(model), []
    held = [(value.entry, value.tensor, value.start) for value in InnerValues(optimizer, view).values]
    held += [(entry, entry.parameter.detach(), 0) for entry in view.entries if not entry.parameter.requires_grad]
    for entry, tensor, first in held:
        for start, box in global_views(entry.slice, tensor, first, first + tensor.numel()):
            boxes.append((entry.tensor.name, start, tuple(box.shape), box.detach().cpu().numpy().tobytes()))
    args = get_args()
    args.remembered = {**getattr(args, "remembered", {}), (when, iteration): boxes}


def remembered(model, optimizer, args):
    """Probe: what is held at the end, and what was remembered."""
    return *values_held(model, optimizer, args), args.remembered


def tell(path, when, iteration, model, optimizer) -> None:
    """Say that the sixth step is done."""
    if (when, iteration) == ("after", 6):
        path.touch()


def hold(path, when, iteration, model, optimizer) -> None:
    """Begin the fourth step when the other peer has ended its sixth."""
    if (when, iteration) == ("before", 4):
        until(path.exists, "six steps of the other peer")


def fail(pid, when, iteration, model, optimizer) -> None:
    """Kill the server before the first interval ends, and fail while the round is in flight."""
    if (when, iteration) == ("before", 4):
        kill_process(pid)
    if (when, iteration) == ("before", 6):
        raise RuntimeError("something else")


def lose(pid, when, iteration, model, optimizer) -> None:
    """Kill the server before the first interval ends."""
    if (when, iteration) == ("before", 4) and os.environ["RANK"] == "0":
        kill_process(pid)


def at(ranks: list[RankOutcome], when: str, iteration: int) -> Model:
    """Return a job's model before or after a step."""
    return model_of([SimpleNamespace(probe=(rank.probe[3][when, iteration],)) for rank in ranks])


def result(service: Service, number: int) -> Model:
    """Return the values of a round, as the server has them."""
    found = load_file(service.state / "runs/demo/snapshots" / snapshot_name(number))
    return {name: values for name, values in found.items() if not name.startswith("outer:")}


def moved(taken: Model, now: Model, contributed: Model) -> Model:
    """Return R + (now - S)."""
    return {name: values + (now[name] - contributed[name]) for name, values in taken.items()}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two peers that nothing happens to."""

    service: Service
    first: list[RankOutcome]
    second: list[RankOutcome]


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Peers that apply rounds two steps and one step later; the second one waits for six steps of the first."""
    folder = tmp_path_factory.mktemp("delay")
    service = Service(zygote, folder, {"demo": {"peers": 2}}, extra={"keep_snapshots": 9})
    service.start()
    beforehand = partial(in_steps, remember)
    first = start_job(
        service,
        "a",
        SINGLE,
        before=(beforehand, partial(in_steps, partial(tell, folder / "told"))),
        probe=remembered,
        **FIRST,
        save=str(folder / "a"),
    )
    # Whose weights begin the run.
    until(lambda: has_joined(service), "the first peer")
    # Where the first one waits for its round at once, this one never begins its fourth step.
    held = (beforehand, partial(in_steps, partial(hold, folder / "told")))
    second = start_job(service, "b", SHARDED, before=held, probe=remembered, **SECOND)
    yield Pair(service=service, first=first.result(), second=second.result())
    service.stop()


@pytest.mark.parametrize(("peer", "delay"), [("first", 2), ("second", 1)])
def test_the_values_are_those_of_the_round_moved_by_the_steps_since(undisturbed: Pair, peer: str, delay: int):
    ranks, taken = getattr(undisturbed, peer), result(undisturbed.service, 1)
    contributed, now = at(ranks, "after", 4), at(ranks, "after", 4 + delay)
    applied = at(ranks, "before", 5 + delay)
    assert same_bits(applied, moved(taken, now, contributed))
    assert not same_bits(applied, taken) and not same_bits(applied, now)
    for iteration in range(4, 4 + delay):
        # Nothing is applied earlier.
        assert same_bits(at(ranks, "before", iteration + 1), at(ranks, "after", iteration))


def test_what_is_contributed_are_the_values_at_the_end_of_the_interval(undisturbed: Pair):
    for number, iteration in ((1, 4), (2, 8), (3, 12)):
        ends = [at(ranks, "after", iteration) for ranks in (undisturbed.first, undisturbed.second)]
        for name, values in result(undisturbed.service, number).items():
            np.testing.assert_allclose(values, (ends[0][name] + ends[1][name]) / 2, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_checkpoint_applies_the_round_in_flight(undisturbed: Pair):
    ranks = undisturbed.first
    expected = moved(result(undisturbed.service, 2), at(ranks, "after", 9), at(ranks, "after", 8))
    assert same_bits(at(ranks, "before", 10), expected)
    assert "sync service: the checkpoint applies round 2 after 1 of 2 steps" in ranks[0].stdout


def test_the_end_of_training_applies_the_round_in_flight(undisturbed: Pair):
    for ranks, delay in ((undisturbed.first, 2), (undisturbed.second, 1)):
        assert f"the end of training applies round 3 after 0 of {delay} steps" in ranks[0].stdout
        assert same_bits(model_of(ranks), result(undisturbed.service, 3))
        # What was gathered from the other ranks' shards, too.
        assert all(rank.parameters == ranks[0].parameters for rank in ranks)


def test_the_iteration_line_tells_of_the_round_when_it_is_applied(undisturbed: Pair):
    lines = [line for line in undisturbed.first[0].stdout.splitlines() if " iteration  " in line]
    assert "sync round: 0 |" in lines[4] and "sync wait s" not in lines[4]
    assert "sync round: 1 | peers: 2/2 |" in lines[5] and "sync wait s: " in lines[5]


def test_a_peer_killed_with_a_round_in_flight_and_one_resumed_change_no_bit(
    make_service: MakeService, undisturbed: Pair, tmp_path: Path
):
    service = make_service(peers=2)
    service.start()
    told, options = tmp_path / "told", {**FIRST, "save": str(tmp_path / "a")}
    tells = partial(in_steps, partial(tell, told))
    # After five steps its contribution to the first round is with the server, or in flight.
    failing_job(service, "a", SINGLE, before=(tells, die_in_step(5)), **options)
    assert not told.exists()
    lasting = start_job(service, "b", SHARDED, before=partial(in_steps, partial(hold, told)), **SECOND)
    # This one is killed after the checkpoint that had a round in flight.
    failing_job(service, "a", SINGLE, before=(tells, die_in_step(10)), **options)
    again = run_job(service, "a", SINGLE, load=str(tmp_path / "a"), **options)
    assert "0 of 2 of the samples, 1 steps after round 2" in again[0].stdout
    assert same_bits(model_of(again), model_of(undisturbed.first))
    assert same_bits(model_of(lasting.result()), model_of(undisturbed.second))
    assert [event["digest"] for event in service.events("committed")] == [
        event["digest"] for event in undisturbed.service.events("committed")
    ]


def test_guests_continue_from_the_same_formula(make_service: MakeService, tmp_path: Path):
    service = make_service(peers=2)
    service.start()
    kind, jobs = ("single", "fp32", 2), []
    for name, common, listed, act in zip("ab", (FIRST, SECOND), SWITCHED, (tell, hold), strict=True):
        options = {**common, **listed, "train_iters": 8, "save_interval": None}
        before = (partial(in_steps, remember), partial(in_steps, partial(act, tmp_path / "told")))
        jobs.append(start_job(service, name, kind, before=before, probe=remembered, **options))
        until(lambda: has_joined(service), "the first peer")
    for job, delay in zip(jobs, (2, 1), strict=True):
        ranks = job.result()
        expected = moved(result(service, 1), at(ranks, "after", 4 + delay), at(ranks, "after", 4))
        assert same_bits(at(ranks, "before", 5 + delay), expected)
        # Among them, parameters and authoritative values are equal: guests borrow the former.
        assert same_bits(model_of(ranks), result(service, 2))


def test_what_other_peers_own_is_as_in_the_round(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": RUN})
    service.start()
    jobs = []
    for index, act in enumerate((tell, hold)):
        options = {**SPES, "sync_service_index": index, "sync_service_delay": 2}
        before = (partial(in_steps, remember), partial(in_steps, partial(act, tmp_path / "told")))
        jobs.append(start_job(service, "ab"[index], SINGLE, before=before, probe=remembered, **options))
        until(lambda: has_joined(service), "the first peer")
    ends = [job.result() for job in jobs]
    taken = result(service, 1)
    for index, ranks in enumerate(ends):
        contributed, now, applied = (at(ranks, *when) for when in (("after", 4), ("after", 6), ("before", 7)))
        assert same_bits(applied, moved(taken, now, contributed))
        # Experts 0 and 2 are the first peer's, 1 and 3 the second one's.
        experts = {name: values for name, values in applied.items() if ".experts." in name}
        frozen = {name for name, values in experts.items() if values.tobytes() == taken[name].tobytes()}
        assert frozen == {name for name in experts if expert_of(name) % 2 != index}


def test_a_lossy_codec_and_rounds_that_wait_for_nobody_lead_to_the_same_formula(make_service: MakeService):
    service = make_service(peers=2, rounds="asynchronous", outer_optimizer="sgd")
    service.start()
    options = {"sync_service_delay": 3, "sync_service_codec": "int8", "train_iters": 8}
    ranks = run_job(service, "a", SINGLE, before=partial(in_steps, remember), probe=remembered, **options)
    expected = moved(result(service, 1), at(ranks, "after", 7), at(ranks, "after", 4))
    assert same_bits(at(ranks, "before", 8), expected)
    assert same_bits(model_of(ranks), result(service, 2))


def test_an_exit_lets_the_contribution_in_flight_count(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    (rank,) = run_job(service, "a", SINGLE, sync_service_delay=2, exit_interval=5)
    assert "sync service: the exit applies round 1 after 1 of 2 steps" in rank.stdout
    assert [event["contributors"] for event in service.events("committed")[1:]] == [["a"]]


def test_a_job_that_fails_with_a_round_in_flight_ends_at_once(make_service: MakeService):
    service = make_service(peers=1)
    # For an hour, which is longer than this test waits, it would be tried again to upload.
    long = {"sync_service_delay": 2, "sync_service_patience_seconds": 3600}
    server = service.start()
    said = failing_job(service, "a", SINGLE, before=partial(in_steps, partial(fail, server.pid)), **long)
    assert "RuntimeError: something else" in said


def test_what_goes_wrong_with_a_round_in_flight_is_said_once(make_service: MakeService):
    service = make_service(peers=1)
    server = service.start()
    short = {"sync_service_delay": 2, "sync_service_patience_seconds": 0.5}
    said = failing_job(service, "a", SHARDED, before=partial(in_steps, partial(lose, server.pid)), **short)
    errors = [line for line in said.splitlines() if "megatron-ext: error" in line]
    assert len(errors) == 1 and "has not answered Upload for" in errors[0], said
