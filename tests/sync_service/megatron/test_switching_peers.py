# SPDX-License-Identifier: Apache-2.0
"""Megatron jobs with hot switching as peers: a real server, real toy trainings with strategies of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_ext.hot_switch.data.sequences import SequenceOrder
from megatron_ext.hot_switch.data.training_documents import MockDocuments
from tests.support.presets import Options
from tests.support.pretrain import RankOutcome
from tests.support.waiting import until
from tests.sync_service.jobs import has_joined, model_of, same_bits, samples_of, start_job
from tests.sync_service.service import Service, Zygote

RUN = {"demo": {"peers": 2, "outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}}


def strategies(*listed: str, buckets: tuple[int, ...]) -> Options:
    """Return the options of a peer with strategies."""
    vocabulary = {"vocab_size": 127, "make_vocab_size_divisible_by": 8}
    return {**vocabulary, "lr": 1e-3, "hot_switch_strategies": listed, "hot_switch_bucket_sizes": buckets}


SWITCHED = (
    {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        **strategies("2,1,1", "1,2,1", buckets=(32, 12, 0)),
    },
    strategies("1,2,1", "2,1,1", "1,1,2", buckets=(32, 16, 8, 0)),
)
ALONE = strategies("1,1,1", buckets=(32, 0))


def remember_sequences() -> None:
    """Before: keep what is planned for training, as documents and offsets."""
    from megatron.training import get_args

    from megatron_ext.hot_switch.data.batches import BatchReader

    plan = BatchReader.plan

    def planned(self, *args, **kwargs):
        batch, run = plan(self, *args, **kwargs), get_args()
        read = [(sequence.document, sequence.offset) for sequence in batch.sequences]
        run.samples_seen = [*getattr(run, "samples_seen", []), *read]
        return batch

    BatchReader.plan = planned


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two peers of one run that have trained to the end."""

    service: Service
    """Where they met."""

    jobs: tuple[list[RankOutcome], list[RankOutcome]]
    """What they have computed."""


@pytest.fixture(scope="module")
def runs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    """A run of peers with guests, on two ranks each, and one of peers without, on one."""
    started = []
    for name, ranks, options in (("switched", 2, SWITCHED), ("alone", 1, (ALONE, ALONE))):
        service = Service(zygote, tmp_path_factory.mktemp(name), RUN)
        service.start()
        jobs = []
        for index, each in enumerate(options):
            common = {"sync_service_index": index, "before": remember_sequences}
            jobs.append(start_job(service, "ab"[index], ("single", "fp32", ranks), **common, **each))
            if name == "switched":
                # The first peer's weights begin the run; those of another home would be others.
                until(lambda service=service: has_joined(service), "the first peer")
        started.append((service, jobs))
    yield tuple(Pair(service=service, jobs=tuple(job.result() for job in jobs)) for service, jobs in started)
    for service, _ in started:
        service.stop()


def test_peers_with_guests_compute_what_peers_without_do(runs: tuple[Pair, Pair]):
    switched, alone = runs
    for ours, theirs in zip(switched.jobs, alone.jobs, strict=True):
        # The second half begins with what a round has made of the first.
        assert len(ours[-1].losses) == 8
        assert ours[-1].losses == pytest.approx(theirs[-1].losses, rel=0, abs=1e-5)
        assert ours[0].grad_norms == pytest.approx(theirs[0].grad_norms, rel=1e-4)
        mine, others = model_of(ours), model_of(theirs)
        assert mine.keys() == others.keys()
        apart = max((float(np.abs(mine[name] - others[name]).max()), name) for name in mine)
        assert apart[0] <= 1e-4, apart


def test_after_a_round_peers_with_different_strategies_have_the_same_bits(runs: tuple[Pair, Pair]):
    switched, _ = runs
    assert same_bits(*map(model_of, switched.jobs))
    committed = switched.service.events("committed")
    assert [sorted(event["contributors"]) for event in committed[1:]] == [["a", "b"]] * 2


def test_peers_share_the_sequences_without_overlap(runs: tuple[Pair, Pair]):
    documents = MockDocuments(longest=32, vocab_size=127, seed=1234)
    order = SequenceOrder(documents.lengths, longest=32, seed=1234)
    whole = [(sequence.document, sequence.offset) for sequence in map(order.at, range(64))]
    for pair in runs:
        for index, ranks in enumerate(pair.jobs):
            assert samples_of(ranks) == sorted(whole[index::2])
    assert "sequences per epoch, of which this job reads part 1 of 2" in runs[0].jobs[1][0].stdout
