# SPDX-License-Identifier: Apache-2.0
"""Megatron's dumps of what goes through layers, on a double of Transformer Engine: a peer's are those of an own job."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.dumps import assert_same, dumps, iterations
from tests.support.presets import GROUPED
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine
from tests.sync_service.jobs import ALONE, Kind, job_arguments, run_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
KIND: Kind = ("moe-ep2", "bf16", 2)
OPTIONS = {
    **GROUPED,
    **{f"save_{what}_interval": 1 for what in ("activations", "dgrads", "tokens_per_expert")},
    "transformer_impl": "transformer_engine",
    "save_interval": 100,
    "train_iters": 4,
}


@pytest.mark.usefixtures("double_of_transformer_engine")
def test_what_goes_through_a_peers_layers_is_dumped_as_in_a_job_of_its_own(make_service: MakeService, tmp_path: Path):
    service = make_service(peers=1)
    service.start()
    # The mean of one peer is what it has sent: the round after two steps changes nothing.
    ours = {**OPTIONS, "sync_service_interval": 2, "save": str(tmp_path / "peer")}
    run_job(service, "a", KIND, before=accept_transformer_engine, **ours)
    assert service.events("committed")[-1]["round"] == 2
    alone = job_arguments(service, "a", KIND, **ALONE, **OPTIONS, save=str(tmp_path / "alone"))
    run_pretrain(alone, KIND[2], patch="backend-only", before=accept_transformer_engine)
    found = iterations(tmp_path / "peer")
    assert found == {(what, f"iter_000000{number}") for what in ("activations", "dgrads") for number in range(1, 5)}
    assert_same(dumps(tmp_path / "peer"), dumps(tmp_path / "alone"))
    counts, expected = (sorted((tmp_path / name).rglob("rank*.jsonl")) for name in ("peer", "alone"))
    assert len(counts) == len(expected) == 2
    assert [path.read_text() for path in counts] == [path.read_text() for path in expected]
