# SPDX-License-Identifier: Apache-2.0
"""SPES on grouped experts, on a double of Transformer Engine: the real one needs a GPU."""

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.spes import Ownership, training_bytes
from tests.spes.test_feature import MODEL, RUN, SPES, expert_of, values_and_memory, watch_steps
from tests.spes.test_stock_start import by_name, moments
from tests.support.distributed import run_ranks
from tests.support.pretrain import run_pretrain
from tests.support.transformer_engine import accept_transformer_engine
from tests.support.waiting import until
from tests.sync_service.jobs import (
    ALONE,
    SINGLE,
    die_in_step,
    failing_job,
    has_joined,
    job_arguments,
    model_of,
    run_job,
    same_bits,
    start_job,
)
from tests.sync_service.service import Service, Zygote

TE = {"transformer_impl": "transformer_engine"}
GROUPED = {**TE, "moe_grouped_gemm": True}
OWNERS = {"interleaved": {"a": {0, 2}, "b": {1, 3}}, "contiguous": {"a": {0, 1}, "b": {2, 3}}}
EP2 = ("moe-ep2", "fp32", 2)


@pytest.fixture(scope="module", autouse=True)
def ranks(double_of_transformer_engine) -> None:
    """Wait until ranks start fast: peers wait for each other."""
    run_ranks(int, 1)


def serve(folder: Path, zygote: Zygote, **runs: object) -> Service:
    folder.mkdir()
    service = Service(zygote, folder, runs)
    service.start()
    return service


def meet(folder, zygote, kind, grouped=None, **options):
    """Two watched peers: the first one has SequentialMLP, the second one `grouped` laid over its options."""
    service = serve(folder, zygote, demo=RUN)
    options = {**SPES, "probe": values_and_memory, "before": (accept_transformer_engine, watch_steps), **options}
    first = start_job(service, "a", kind, sync_service_index=0, **options)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(service, "b", kind, sync_service_index=1, **{**options, **(grouped or {})})
    jobs = first.result(), second.result()
    service.stop()
    return jobs


@pytest.mark.parametrize(
    ("kind", "assignment", "options"),
    [
        (SINGLE, "interleaved", {}),
    ],
    ids=["one rank"],
)
def test_grouped_experts_learn_what_sequential_ones_learn(tmp_path: Path, zygote: Zygote, kind, assignment, options):
    options = {**options, "spes_expert_assignment": assignment}
    sequential = meet(tmp_path / "sequential", zygote, kind, **options)
    mixed = meet(tmp_path / "mixed", zygote, kind, grouped=GROUPED, **options)
    ours, theirs, expected = map(model_of, (*mixed, sequential[1]))
    assert same_bits(ours, theirs)
    assert ours.keys() == expected.keys()
    for name, values in ours.items():
        # Sums are rounded in another order; a key's bias has no gradient but rounding errors.
        tolerance = 1e-3 if name.endswith("linear_qkv.bias") else 1e-5
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=tolerance, err_msg=name)
    own = OWNERS[assignment]["b"]
    assert len(mixed[1][0].probe[3]) == 8
    for step in zip(*(rank.probe[3] for rank in mixed[1]), strict=True):
        for names in map(set.union, *step):
            assert {expert_of(tensor) for tensor in names} == {None, *own}
    shapes = {name: values.shape for name, values in ours.items()}
    needed = training_bytes(shapes, getattr(Ownership, assignment)(2, 4), 1, weight_bytes=4)
    for rank, there in zip(mixed[1], sequential[1], strict=True):
        assert rank.probe[4] == there.probe[4]
    if kind is SINGLE:
        assert mixed[1][0].probe[4][:2] == (needed, 0)


ALONE_AT_THE_SERVER = {**RUN, "quorum": 1, "grace_seconds": 0.1}


@pytest.mark.slow
def test_a_killed_peer_resumes_with_the_bits_that_it_would_have_had(tmp_path: Path, zygote: Zygote):
    service = serve(tmp_path / "service", zygote, whole=ALONE_AT_THE_SERVER, killed=ALONE_AT_THE_SERVER)
    kind = ("moe-ep2", "bf16-distopt-overlap", 2)
    options = {**SPES, **GROUPED, "sync_service_index": 1, "save_interval": 6, "before": accept_transformer_engine}
    whole = run_job(service, "b", kind, sync_service_run="whole", save=str(tmp_path / "whole"), **options)
    options |= {"sync_service_run": "killed", "save": str(tmp_path / "killed")}
    failing_job(service, "b", kind, **{**options, "before": (accept_transformer_engine, die_in_step(7))})
    again = run_job(service, "b", kind, load=str(tmp_path / "killed"), **options)
    service.stop()
    assert "2 steps after round 1" in again[0].stdout
    assert same_bits(model_of(again), model_of(whole))


@pytest.mark.slow
def test_other_kinds_of_experts_take_the_weights_from_a_checkpoint(tmp_path: Path, zygote: Zygote):
    service = serve(tmp_path / "service", zygote, demo=ALONE_AT_THE_SERVER)
    saved, until_there = str(tmp_path / "saved"), {"train_iters": 6, "save_interval": 6}
    options = {**SPES, **GROUPED, "sync_service_index": 1, **until_there, "before": accept_transformer_engine}
    found = model_of(run_job(service, "b", EP2, save=saved, **options))
    for experts in (TE, GROUPED):
        read = {**MODEL, **ALONE, **experts, "load": saved, "no_load_optim": True, "train_iters": 6}
        job = run_job(service, "none", SINGLE, before=accept_transformer_engine, **read)
        assert same_bits(model_of(job), found)
    service.stop()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-distopt"])
def test_grouped_experts_start_from_what_a_job_with_sequential_ones_has_saved(
    tmp_path: Path, zygote: Zygote, precision: str
):
    service = serve(tmp_path / "service", zygote, demo=ALONE_AT_THE_SERVER)
    kind, saved = ("moe-ep2", precision, 2), str(tmp_path / "stock")
    common = {**MODEL, **TE, "train_iters": 4, "dist_ckpt_optim_fully_reshardable": precision != "fp32"}
    words = job_arguments(service, "none", kind, **common, **ALONE, global_batch_size=8, save=saved, save_interval=4)
    probes = {"probe": moments, "before": accept_transformer_engine}
    stock = by_name(run_pretrain(words, 2, patch="backend-only", **probes))
    options = {**SPES, **common, **GROUPED, "load": saved, "sync_service_index": 1}
    found = by_name(run_job(service, "b", kind, **probes, **options))
    service.stop()
    assert {expert_of(name) for name in found} == {None, 1, 3}
    for name, states in found.items():
        for state, value in states.items():
            assert value.equal(stock[name][state]), (name, state)
        assert states["step"] == 4 and states["exp_avg"].any(), name
