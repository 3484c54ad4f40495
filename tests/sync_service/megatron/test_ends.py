# SPDX-License-Identifier: Apache-2.0
"""What the end of a peer leaves behind: its last checkpoint, whatever the server does."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sync_service.jobs import SINGLE, Kind, failing_job, model_of, run_job, same_bits
from tests.sync_service.service import Service, kill_process

MakeService = Callable[..., Service]
# Two steps after the only round; nothing is saved before the end.
ENDING = {"train_iters": 6, "save_interval": 100}


def kill_in_step(iteration: int, process: int) -> None:
    """Before: kill the server in a step; iterations count from 0."""
    import functools

    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == iteration:
            kill_process(process)
        return original(*args, **kwargs)

    training.train_step = train_step


def place(folder: Path) -> dict[str, Any]:
    """Return where the peer was, as the last checkpoint says."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    state: dict[str, Any] = load_common_state_dict(str(folder / "iter_0000006"))["sync_service"]
    return state


@pytest.mark.parametrize("delay", [0, 3], ids=["between rounds", "during a round"])
def test_the_last_checkpoint_is_written_though_the_server_is_gone(
    make_service: MakeService, tmp_path: Path, delay: int
):
    service = make_service(peers=1)
    service.start()
    assert service.server is not None
    # With a delay the round after step 4 would be applied after the end.
    options = {**ENDING, "sync_service_patience_seconds": 3, "sync_service_delay": delay or None}
    die = partial(kill_in_step, 3 if delay else 5, service.server.pid)
    ended = run_job(service, "a", SINGLE, save=str(tmp_path / "a"), before=die, **options)
    assert (tmp_path / "a" / "latest_checkpointed_iteration.txt").read_text() == "6"
    said = ended[0].stdout
    assert "the server does not know that this peer has ended" in said
    assert ("training ends with this job's own weights" in said) == bool(delay)
    # The round after step 4 is lost with a delay, and was made without.
    assert (place(tmp_path / "a")["round"], place(tmp_path / "a")["steps"]) == ((0, 6) if delay else (1, 2))


@pytest.mark.parametrize("length", [{}, {"train_iters": None, "train_samples": 26}], ids=["steps", "samples"])
def test_a_peer_that_has_ended_and_is_started_again_changes_nothing(
    make_service: MakeService, tmp_path: Path, length: dict[str, Any]
):
    service = make_service(peers=1)
    service.start()
    # Of 26 samples the last two make no step.
    options = {**ENDING, **length, "save": str(tmp_path / "a")}
    ended = run_job(service, "a", SINGLE, **options)
    events, before = service.events("joined"), place(tmp_path / "a")
    again = run_job(service, "a", SINGLE, load=str(tmp_path / "a"), **options)
    assert "the training that was loaded is over" in again[0].stdout
    assert service.events("joined") == events
    assert same_bits(model_of(again), model_of(ended))
    assert place(tmp_path / "a") == before


@pytest.mark.slow
def test_a_peer_whose_checkpoint_is_older_than_its_last_round_makes_no_step_and_saves_the_end(
    make_service: MakeService, tmp_path: Path
):
    service = make_service(peers=1)
    service.start()
    options = {"train_iters": 8, "save": str(tmp_path / "a"), "save_interval": 6}
    ended = run_job(service, "a", SINGLE, **options)
    shutil.rmtree(tmp_path / "a" / "iter_0000008")
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text("6")
    (again,) = run_job(service, "a", SINGLE, load=str(tmp_path / "a"), **options)
    assert again.record.steps == [] and (tmp_path / "a" / "iter_0000008").is_dir()
    assert same_bits(model_of([again]), model_of(ended))


@pytest.mark.parametrize("ranks", [SINGLE, ("tp2", "fp32", 2)], ids=["one rank", "two ranks"])
def test_a_new_job_for_which_an_old_run_leaves_nothing_to_train_is_refused_and_stays_no_member(
    make_service: MakeService, tmp_path: Path, ranks: Kind
):
    service = make_service(peers=1)
    service.start()
    run_job(service, "a", SINGLE, train_iters=4)
    rounds = service.events("committed")
    said = failing_job(service, "a", ranks, train_iters=4, save=str(tmp_path / "a"), save_interval=100)
    assert "--sync-service-run demo: part 0 of the samples is trained up to iteration 4 in this run" in said
    assert "would train nothing; give a new experiment a run of another name" in said
    assert service.events("committed") == rounds and not list(tmp_path.glob("a/iter_*"))
    assert [event["event"] for event in service.journal()][-2:] == ["joined", "left"]


def test_a_checkpoint_of_the_end_is_one_of_that_place(make_service: MakeService, tmp_path: Path):
    service = make_service(peers=1)
    service.start()
    run_job(service, "a", SINGLE, save=str(tmp_path / "a"), **ENDING)
    state = place(tmp_path / "a")
    assert (state["round"], state["steps"]) == (1, 2)
    assert state["digest"] == service.events("committed")[1]["digest"]
