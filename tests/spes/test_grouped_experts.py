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
from tests.support.transformer_engine import accept_transformer_engine, fuse_the_accumulation_of_gradients
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
BIASES = {"disable_bias_linear": None, "swiglu": None}
# With Adam's usual epsilon, where gradients are next to nothing a rounding error makes a step.
STEADY = {"adam_eps": 1e-4}
EP2, TP2 = ("moe-ep2", "fp32", 2), ("tp2-sp", "fp32", 2)


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


def assert_equal_except_for_rounding(mixed, sequential):
    """Both peers of `mixed` end with the model of the second one of `sequential`, which is returned."""
    ours, theirs, expected = map(model_of, (*mixed, sequential[1]))
    assert same_bits(ours, theirs)
    assert ours.keys() == expected.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-5, err_msg=name)
    return ours


@pytest.mark.parametrize(
    ("kind", "assignment", "options"),
    [
        (SINGLE, "interleaved", {}),
        # Rank 0 of the second peer has no expert of its own, rank 1 no other.
        pytest.param(EP2, "contiguous", BIASES, marks=pytest.mark.slow),
        pytest.param(TP2, "interleaved", {}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "ranks of experts, biases", "tensor-parallel experts"],
)
def test_grouped_experts_learn_what_sequential_ones_learn(tmp_path: Path, zygote: Zygote, kind, assignment, options):
    options = {**options, **STEADY, "spes_expert_assignment": assignment}
    sequential = meet(tmp_path / "sequential", zygote, kind, **options)
    mixed = meet(tmp_path / "mixed", zygote, kind, grouped=GROUPED, **options)
    ours = assert_equal_except_for_rounding(mixed, sequential)
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


STRATEGIES = """
bucket_sizes: [32, 12, 0]
strategies:
  - {dp: 1, tp: 2, pp: 1, sequence_parallel: true}
  - {dp: 2, tp: 1, pp: 1, ep: 2}
"""


@pytest.mark.slow
def test_guests_of_hot_switching_learn_what_those_with_sequential_experts_learn(tmp_path: Path, zygote: Zygote):
    file = tmp_path / "strategies.yaml"
    file.write_text(STRATEGIES)
    # Rank 0 of the guest has no expert of the second peer's.
    options = {**TE, **STEADY, "attention_backend": "auto", "spes_expert_assignment": "contiguous"}
    options |= {"hot_switch_strategy_file": str(file), "vocab_size": 127, "make_vocab_size_divisible_by": 8}
    kind = ("single", "fp32", 2)
    sequential = meet(tmp_path / "sequential", zygote, kind, **options)
    mixed = meet(tmp_path / "mixed", zygote, kind, grouped=GROUPED, **options)
    assert_equal_except_for_rounding(mixed, sequential)
    for rank in mixed[1]:
        assert all({expert_of(tensor) for tensor in changed} <= {None, 2, 3} for changed, _ in rank.probe[3])


ALONE_AT_THE_SERVER = {**RUN, "quorum": 1, "grace_seconds": 0.1}


@pytest.mark.slow
def test_how_products_are_made_changes_nothing(tmp_path: Path, zygote: Zygote):
    ways = {
        "plain": {},
        "recomputed activations": {"recompute_granularity": "selective", "recompute_modules": "moe_act"},
        "recomputed experts": {"recompute_granularity": "selective", "recompute_modules": "moe"},
        "recomputed layers": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "added where they gather": {"no_gradient_accumulation_fusion": None},
    }
    names = {way: way.replace(" ", "_") for way in ways}
    service = serve(tmp_path / "service", zygote, **dict.fromkeys(names.values(), ALONE_AT_THE_SERVER))
    found = {}
    for way, options in ways.items():
        fused = (fuse_the_accumulation_of_gradients,) if "no_gradient_accumulation_fusion" in options else ()
        options = {**SPES, **GROUPED, **options, "sync_service_index": 1, "sync_service_run": names[way]}
        job = run_job(service, "b", SINGLE, before=(accept_transformer_engine, *fused), **options)
        found[way] = model_of(job)
    service.stop()
    for way, model in found.items():
        for name, values in found["plain"].items():
            np.testing.assert_allclose(model[name], values, rtol=0, atol=1e-6, err_msg=f"{way}: {name}")


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
