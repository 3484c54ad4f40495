# SPDX-License-Identifier: Apache-2.0
"""Megatron jobs as peers: a real server, real toy trainings."""

import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.every_run import one_of_each
from tests.support.pretrain import run_pretrain
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
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
    values_held,
)
from tests.sync_service.service import Service, Zygote

MakeService = Callable[..., Service]
SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}


def digests(service: Service) -> list[str]:
    return [event["digest"] for event in service.events("committed")]


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list]]:
    """Two peers of one rank each that nothing happens to: the service, and what the jobs have computed."""
    service = Service(zygote, tmp_path_factory.mktemp("undisturbed"), {"demo": {"peers": 2, **SGD}})
    service.start()
    jobs = [
        start_job(service, name, SINGLE, sync_service_index=index, before=remember_samples)
        for index, name in enumerate("ab")
    ]
    yield service, [job.result() for job in jobs]
    service.stop()


@pytest.mark.parametrize(
    ("kinds", "codec", "servers"),
    one_of_each(
        [
            (
                [("tp2", "bf16", 2), ("pp2", "bf16-distopt", 2), ("single", "bf16-distopt-overlap", 2), SINGLE],
                "fp32",
                1,
            ),
            ([("moe-ep2", "bf16-distopt", 2), ("moe-ep2", "fp32", 2)], "int8", 2),
            ([("latent-tp2", "bf16-distopt", 2), ("latent", "fp32", 1)], "bf16", 1),
        ],
        {0, 1},
    ),
    ids=["dense-fp32", "moe-int8-two-servers", "latent-attention-bf16"],
)
def test_peers_of_different_layouts_end_with_the_same_bits(
    make_service: MakeService, kinds: list[Kind], codec: str, servers: int
):
    service = make_service({"demo": {"peers": len(kinds), **SGD}})
    Cluster(service, servers).start_all()
    names = "abcd"[: len(kinds)]
    jobs = [start_job(service, *job, sync_service_codec=codec) for job in zip(names, kinds, strict=True)]
    models = [model_of(job.result()) for job in jobs]
    assert all(same_bits(models[0], model) for model in models[1:])
    assert [sorted(event["contributors"]) for event in service.events("committed")[1:]] == [list(names)] * 2
    # Whichever pipeline stage knows it.
    assert all(event["loss"] > 0 for event in service.events("uploaded") if event["round"] > 0)
    for job, model in zip(jobs, models, strict=True):
        # However many ranks hold an element, one of them uploads it.
        assert sum(rank.probe[2] for rank in job.result()) == sum(values.size for values in model.values())


def test_the_iteration_line_tells_of_the_round(undisturbed):
    _, (first, _) = undisturbed
    lines = [line for line in first[0].stdout.splitlines() if re.search(r" iteration +\d", line)]
    assert "sync round: 0 |" in lines[2] and "peers" not in lines[2]
    assert "sync round: 1 | peers: 2/2 | sync MB up: " in lines[3]
    assert "sync round: 2 | peers: 2/2 |" in lines[7]


def test_a_job_reports_the_mean_loss_of_its_intervals(undisturbed):
    service, (first, _) = undisturbed
    printed = [float(loss) for loss in re.findall(r"lm loss: (\S+)", first[0].stdout)]
    events = [event for event in service.events("uploaded") if event["peer"] == "a" and event["round"] > 0]
    assert [event["steps"] for event in events] == [4, 4]
    # Megatron's second line says the mean of the first two steps.
    means = [(2 * printed[1] + printed[2] + printed[3]) / 4, sum(printed[4:]) / 4]
    assert [event["loss"] for event in events] == pytest.approx(means, rel=1e-5)


def test_peers_share_the_samples_without_overlap(undisturbed):
    _, (first, other) = undisturbed
    assert samples_of(first) == list(range(0, 64, 2))
    assert samples_of(other) == list(range(1, 64, 2))
    # Megatron builds the dataset for as many samples as all peers read.
    assert re.search(r"datasets target sizes .*\n +train: +64\n", first[0].stdout)


def test_peers_do_what_workers_inside_one_job_do(undisturbed):
    service, (apart, _) = undisturbed
    inside = {
        "use_local_sgd": True,
        "local_sgd_workers": 2,
        "local_sgd_sync_interval": 4,
        "global_batch_size": 8,
        **SGD,
        **ALONE,
    }
    (workers, _) = run_pretrain(job_arguments(service, "none", SINGLE, **inside), 2, probe=values_held)
    found = model_of(apart)
    for name, values in model_of([workers]).items():
        # Sums are rounded in another order. The gradient of a key's bias is nothing but rounding errors, which Adam
        # makes steps of; all else is closer by two orders.
        tolerance = 1e-4 if name.endswith("linear_qkv.bias") else 1e-6
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


def test_a_server_and_a_peer_in_mid_interval_that_are_killed_change_no_bit(
    make_service: MakeService, undisturbed, tmp_path: Path
):
    service = make_service({"demo": {"peers": 2, **SGD}})
    service.start()
    lasting = start_job(service, "a", SINGLE, sync_service_index=0)
    folder = {"save": str(tmp_path / "b"), "save_interval": 6, "sync_service_index": 1}
    failing_job(service, "b", SINGLE, before=die_in_step(7), **folder)
    assert len(service.events("committed")) == 2
    service.server.kill()
    service.server.wait()
    service.start()
    again = run_job(service, "b", SINGLE, load=str(tmp_path / "b"), before=remember_samples, **folder)
    assert "1 of 2 of the samples, 2 steps after round 1" in again[0].stdout
    assert samples_of(again) == list(range(49, 64, 2))
    assert same_bits(model_of(lasting.result()), model_of(again))
    assert digests(service) == digests(undisturbed[0])


def test_a_run_that_has_ended_is_prolonged_under_another_name(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": {"peers": 1}, "longer": {"peers": 1}})
    service.start()
    saved, first = str(tmp_path), {"sync_service_index": 0, "train_iters": 8}
    run_job(service, "a", SINGLE, save=saved, save_interval=8, **first)
    longer = {**first, "train_iters": 16, "override_opt_param_scheduler": True, "load": saved}
    said = failing_job(service, "a", SINGLE, **longer)
    assert "config field '--train-samples, or --train-iters times --global-batch-size'" in said
    run = run_job(service, "a", SINGLE, sync_service_run="longer", before=remember_samples, **longer)
    assert "a checkpoint of run 'demo' of 1 peers, whose weights begin run 'longer' of 1" in run[0].stdout
    assert [step.iteration for step in run[0].record.steps] == list(range(9, 17))
    assert samples_of(run) == list(range(32, 64))


def test_a_job_says_what_of_it_did_not_count_and_why(make_service: MakeService):
    service = make_service({"demo": {"peers": 1, "skip_anomaly": True, "ewma_warmup_steps": 3}})
    service.start()
    (rank,) = run_job(service, "a", SINGLE, sync_service_interval=1, before=diverge)
    said = [line for line in rank.stdout.splitlines() if "left this peer out of" in line]
    (told,) = [line for line in said if "round 7" in line]
    assert "sync service: round 7 left this peer out of layer.1: the norm of its pseudo-gradient is" in told


def diverge() -> None:
    """Before: the seventh step makes something else of a weight."""
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, *rest, **kwargs):
        result = original(forward_step_func, data_iterator, model, *rest, **kwargs)
        if kwargs["iteration"] == 6:
            dict(model[0].named_parameters())["module.decoder.layers.1.mlp.linear_fc2.weight"].data.fill_(9.0)
        return result

    training.train_step = train_step


def test_a_peer_that_joins_late_begins_with_the_newest_round(make_service: MakeService):
    service = make_service({"demo": {"peers": 2, "quorum": 1, "grace_seconds": 0.1}})
    service.start()
    early = run_job(service, "a", SINGLE, sync_service_index=0, train_iters=4)
    # What does not learn uploads what it has adopted.
    late = {"sync_service_index": 1, "train_iters": 4, "lr": 0.0, "before": remember_samples}
    ranks = run_job(service, "b", ("tp2", "bf16", 2), **late)
    assert "1 of 2 of the samples, 0 steps after round 1" in ranks[0].stdout
    assert same_bits(model_of(early), model_of(ranks))
    assert len(set(digests(service)[1:])) == 1 and len(digests(service)) == 3
    assert samples_of(ranks) == list(range(1, 32, 2))


def test_a_single_peer_without_an_outer_optimizer_trains_as_without_the_service(make_service: MakeService):
    service = make_service({"demo": {"peers": 1, "outer_optimizer": "none"}})
    service.start()
    kind = ("single", "bf16-distopt", 1)
    (peer,) = run_job(service, "a", kind, sync_service_peers=1)
    assert len(digests(service)) > 1
    (stock,) = run_pretrain(job_arguments(service, "none", kind, **ALONE), 1, probe=values_held)
    assert peer.losses == stock.losses
    assert peer.parameters == stock.parameters
    assert peer.optimizer == stock.optimizer  # a round leaves Adam's moments alone, too


@pytest.mark.parametrize("by", ["steps", "time"])
def test_jobs_of_different_pace_do_not_wait_for_each_other(make_service: MakeService, by: str):
    # Batches are equal, and so both weights.
    weights = {"steps": "step_weights", "time": "token_weights"}[by]
    service = make_service(peers=2, rounds="asynchronous", outer_optimizer="sgd", **{weights: True})
    service.start()
    if by == "steps":
        options = {"slow": {}, "fast": {"sync_service_interval": 2}}
    else:
        same = {"sync_service_interval": None, "sync_service_interval_seconds": 1.0}
        # 4 steps of 0.3 s, and 2 of 0.6 s. The clock of the other rank is of no interest.
        ticks = {"slow": {0: 0.3, 1: 50.0}, "fast": {0: 0.6}}
        options = {name: {**same, "before": functools.partial(tick, ticks[name])} for name in ticks}
    slow = start_job(service, "slow", ("pp2", "bf16", 2), sync_service_index=1, **options["slow"])
    until(lambda: service.events("committed"), "the start")
    fast = run_job(service, "fast", SINGLE, sync_service_index=0, **options["fast"])
    ends = {"slow": slow.result(), "fast": fast}
    made = [event for event in service.events("committed") if event["round"] > 0]
    assert sorted(event["contributors"][0] for event in made) == ["fast"] * 4 + ["slow"] * 2
    # 1 while there is one of them, else 2 or 4 steps where the mean is 3.
    assert {event["weight"] for event in made} <= {1.0, 2 / 3, 4 / 3}
    for name, ranks in ends.items():
        number = max(event["round"] for event in made if event["contributors"] == [name])
        assert f"sync round: {number} |" in "".join(rank.stdout for rank in ranks)


def tick(seconds: dict[int, float]) -> None:
    """Before: let every step take so long on the clock of intervals, by rank."""
    import os

    from megatron_ext.sync_service.peer.interval import Interval

    now = [0.0]
    begin, count_step = Interval.__init__, Interval.count_step

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs, clock=lambda: now[0])

    def count(self):
        now[0] += seconds[int(os.environ["RANK"])]
        return count_step(self)

    Interval.__init__, Interval.count_step = init, count


def freeze_positions() -> None:
    """Before: a model of the user's own does not train its position embeddings."""
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.pre_process:
            self.embedding.position_embeddings.weight.requires_grad_(False)

    GPTModel.__init__ = init


def test_parameters_that_nobody_trains_are_refused_at_the_start(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    # The last stage has none of them, and must not wait for the first one.
    stages = ("pp2", "fp32", 2)
    said = failing_job(service, "a", stages, before=freeze_positions, untie_embeddings_and_output_weights=True)
    errors = [line for line in said.splitlines() if "megatron-ext: error:" in line]
    assert len(errors) == 1 and "embedding.position_embeddings.weight is frozen" in errors[0], said
    assert "Traceback" not in said


def test_what_does_not_fit_is_said_in_one_sentence(undisturbed):
    service, _ = undisturbed
    for option, sentence in (
        ({"seed": 1}, "config field '--seed' is '1' at peer 'c' and '1234' in the run"),
        ({"num_attention_heads": 2}, "config field '--num-attention-heads' is '2' at peer 'c' and '4' in the run"),
        ({"hidden_size": 64}, "shape of tensor 'embedding.word_embeddings.weight' is"),
    ):
        said = failing_job(service, "c", SINGLE, **option)
        errors = [line for line in said.splitlines() if "megatron-ext: error:" in line]
        assert len(errors) == 1 and sentence in errors[0], said


def send_slowly() -> None:
    """Let an upload take longer than a round may be awaited and tried again, as on a slow link."""
    from megatron_ext.sync_service.peer.outgoing import Outgoing

    original = Outgoing.batches

    @functools.wraps(original)
    def batches(self: Outgoing, *args: object) -> Iterator[object]:
        for batch in original(self, *args):
            time.sleep(10)
            yield batch

    Outgoing.batches = batches  # slower, in a process of its own


def test_ranks_that_have_nothing_to_send_wait_for_those_whose_link_is_slow(make_service: MakeService):
    service = make_service(peers=1)
    service.start()
    replicas = ("single", "fp32", 2)
    impatient = {"sync_service_round_seconds": 2.0, "sync_service_patience_seconds": 0.5}
    run_job(service, "a", replicas, before=send_slowly, train_iters=2, sync_service_interval=2, **impatient)
    assert [event["round"] for event in service.events("committed")] == [0, 1]
