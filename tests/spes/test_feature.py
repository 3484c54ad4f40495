# SPDX-License-Identifier: Apache-2.0
"""SPES inside Megatron: a real server, real toy trainings of mixtures of experts."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.hooks import StepStart, TrainStart
from megatron_ext.spes import Ownership, training_bytes
from megatron_ext.spes.feature import SpesFeature
from tests.spes.test_arguments import FILE, FLAGS, completed
from tests.support.presets import MOE
from tests.support.pretrain import run_pretrain
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
    values_held,
)
from tests.sync_service.service import Service, Zygote

RUN = {
    "peers": 2,
    "outer_optimizer": "sgd",
    "sync_steps": 4,
    "merge_interval": 8,
    "merge_alpha_start": 0.5,
    "merge_decay_steps": 100,
}
# Experts with biases do not run on one rank in Megatron 0.19.
MODEL = {**MOE, "disable_bias_linear": True, "swiglu": True}
SPES = {
    **MODEL,
    "using_spes": True,
    "spes_num_train_experts_per_node": 2,
    "spes_expert_assignment": "interleaved",
}
OWNED = {"a": (0, 2), "b": (1, 3)}


def expert_of(name: str) -> int | None:
    """Return the expert that a global name is of."""
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def watch_steps() -> None:
    """Before: remember which parameters every step has changed, and whether frozen ones have got gradients."""
    from megatron.training import get_args, training

    from megatron_ext.params import ParameterView

    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step_func, data_iterator, model, *rest, **kwargs):
        view = ParameterView.from_model(model)
        before = [entry.parameter.detach().clone() for entry in view.entries]
        result = original(forward_step_func, data_iterator, model, *rest, **kwargs)
        changed = {
            entry.tensor.name
            for entry, value in zip(view.entries, before, strict=True)
            if not value.equal(entry.parameter)
        }
        graded = {
            entry.tensor.name
            for entry in view.entries
            if entry.parameter.grad is not None or getattr(entry.parameter, "main_grad", None) is not None
        }
        args = get_args()
        if not hasattr(args, "first_gradients"):
            args.first_gradients = {
                entry.tensor.name: entry.parameter.main_grad.cpu().numpy().copy()
                for entry in view.entries
                if entry.parameter.requires_grad
            }
        args.steps_seen = [*getattr(args, "steps_seen", []), (changed, graded)]
        return result

    training.train_step = train_step


def values_and_memory(model, optimizer, args):
    """Probe: what `values_held` says, what each step has done, and `memory_held`."""
    memory = memory_held(model, optimizer, args)
    seen = getattr(args, "steps_seen", []), memory, getattr(args, "first_gradients", {})
    return (*values_held(model, optimizer, args), *seen)


def memory_held(model, optimizer, args):
    """Probe: bytes of weights, gradients and optimizer states, of the gradients' padding, and of what is trained."""
    from megatron_ext.spes.held import held_bytes

    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    places = [place for buffer in buffers for place in buffer.param_index_map.values()]
    padding = 4 * (sum(buffer.numel for buffer in buffers) - sum(stop - start for start, stop, *_ in places))
    trained = 4 * sum(value.numel() for chunk in model for value in chunk.parameters() if value.requires_grad)
    return held_bytes(model, optimizer), padding, trained


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list, list]]:
    """One rank in fp32 and two expert-parallel ones in bf16 that nothing happens to: the service and both jobs."""
    service = Service(zygote, tmp_path_factory.mktemp("undisturbed"), {"demo": RUN})
    service.start()
    first = start_job(service, "a", SINGLE, sync_service_index=0, before=watch_steps, probe=values_and_memory, **SPES)
    until(lambda: has_joined(service), "the first peer, which publishes the start")
    second = start_job(
        service,
        "b",
        ("moe-ep2", "bf16-distopt-overlap", 2),
        sync_service_index=1,
        before=watch_steps,
        probe=values_and_memory,
        **SPES,
    )
    yield service, first.result(), second.result()
    service.stop()


def test_what_a_peer_does_not_own_stays_as_it_is_until_the_next_round(undisturbed):
    _, *jobs = undisturbed
    for name, ranks in zip("ab", jobs, strict=True):
        seen = {}
        for rank in ranks:
            for step, (changed, graded) in enumerate(rank.probe[3]):
                experts = {expert_of(tensor) for tensor in changed} - {None}
                assert experts <= set(OWNED[name]) and {expert_of(tensor) for tensor in graded} <= {None, *OWNED[name]}
                seen.setdefault(step, set()).update(changed)
        assert len(seen) == 8
        for changed in seen.values():
            assert {expert_of(tensor) for tensor in changed} == {None, *OWNED[name]}
            assert {f"decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1)} <= changed


def test_gradients_and_optimizer_states_are_those_of_what_is_trained_to_the_byte(undisturbed):
    _, (single,), pair = undisturbed
    shapes = {name: values.shape for name, values in model_of([single]).items()}
    ownership = Ownership.interleaved(2, 4)
    held, padding, _ = single.probe[4]
    assert (held, padding) == (training_bytes(shapes, ownership, 0, weight_bytes=4), 0)
    assert "> megatron_ext: spes: trains 2 of 4 experts: 0, 2" in single.stdout
    told = f"spes: this rank has {held.gradients} bytes of gradients and {held.optimizer} bytes of optimizer states"
    assert single.stdout.count(told) == 1
    # In bf16 with masters, and the distributed optimizer, which shares out the states and pads the gradients.
    needed = training_bytes(shapes, ownership, 1)
    assert sum(rank.probe[4][0].optimizer for rank in pair) == needed.optimizer
    for rank in pair:
        held, padding, trained = rank.probe[4]
        assert held.gradients == trained + padding and 0 < padding < 0.05 * trained


def test_training_all_experts_takes_what_theory_says_as_well(undisturbed):
    words = job_arguments(undisturbed[0], "none", SINGLE, **MODEL, **{**ALONE, "train_iters": 1})
    (everything,) = run_pretrain(words, 1, probe=memory_held)
    (single,) = undisturbed[1]
    shapes = {name: values.shape for name, values in model_of([single]).items()}
    held, padding, _ = everything.probe
    assert (held, padding) == (training_bytes(shapes, weight_bytes=4), 0)
    spared = 4 * sum(values.size for name, values in model_of([single]).items() if expert_of(name) in OWNED["b"])
    own = single.probe[4][0]
    assert (held.gradients - own.gradients, held.optimizer - own.optimizer) == (spared, 2 * spared)


def test_peers_of_different_layouts_have_the_same_model_after_a_round(undisturbed):
    service, first, second = undisturbed
    fp32, bf16 = model_of(first), model_of(second)
    assert fp32.keys() == bf16.keys()
    for name, values in fp32.items():
        if expert_of(name) in OWNED["a"]:
            # Where it is frozen it has no fp32 copy.
            values = bfloat16(values)
        assert values.tobytes() == bf16[name].tobytes(), name
    committed = service.events("committed")
    assert [sorted(event["contributors"]) for event in committed[1:]] == [["a", "b"]] * 2
    assert [event.get("merged") for event in committed] == [None, None, 0.46]


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Return values rounded to bfloat16."""
    import torch

    return torch.from_numpy(values.copy()).bfloat16().float().numpy()


SGD = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.9}


@pytest.fixture(scope="module")
def everywhere(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list]]:
    """Two peers that train all experts (DiLoCo): the service, and what the first one has computed."""
    service = Service(zygote, tmp_path_factory.mktemp("everywhere"), {"demo": {"peers": 2, "sync_steps": 4, **SGD}})
    service.start()
    options = {**MODEL, "using_spes": True, "using_dilico": True, "before": watch_steps, "probe": values_and_memory}
    jobs = [start_job(service, name, SINGLE, sync_service_index=index, **options) for index, name in enumerate("ab")]
    found = [job.result() for job in jobs]
    assert same_bits(*map(model_of, found))
    yield service, found[0]
    service.stop()


def test_peers_that_train_all_experts_do_what_workers_inside_one_job_do(everywhere):
    service, apart = everywhere
    inside = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 4, "global_batch_size": 8}
    command = job_arguments(service, "none", SINGLE, **{**MODEL, **ALONE, **inside, **SGD})
    (workers, _) = run_pretrain(command, 2, probe=values_held)
    found, expected = model_of(apart), model_of([workers])
    experts = [name for name in expected if expert_of(name) is not None]
    assert len(experts) == 2 * 4 * 2
    for name, values in expected.items():
        # Sums are rounded in another order; a key's bias has no gradient but rounding errors.
        tolerance = 1e-4 if name.endswith("linear_qkv.bias") else 1e-6
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


def test_frozen_experts_pass_on_the_gradients_of_their_inputs(undisturbed, everywhere):
    (frozen, *_), (trained, *_) = undisturbed[1], everywhere[1]
    some, all_of_them = frozen.probe[-1], trained.probe[-1]
    shared = [name for name in some if expert_of(name) is None]
    assert {expert_of(name) for name in some} == {None, *OWNED["a"]}
    assert {expert_of(name) for name in all_of_them} == {None, 0, 1, 2, 3}
    for name in shared:
        assert np.abs(some[name]).max() > 0, name
        np.testing.assert_allclose(some[name], all_of_them[name], rtol=1e-5, atol=1e-8, err_msg=name)


def test_a_peer_uploads_what_it_trains_alone(undisturbed):
    service, first, _ = undisturbed
    model = model_of(first)
    uploaded = {(event["round"], event["peer"]): event["bytes"] for event in service.events("uploaded")}
    everything = 4 * sum(values.size for values in model.values())
    trained = 4 * sum(values.size for name, values in model.items() if expert_of(name) in (None, *OWNED["a"]))
    assert uploaded[0, service.events("joined")[0]["peer"]] > everything
    assert trained < uploaded[1, "a"] < 1.2 * trained < everything


def test_a_killed_peer_resumes_in_mid_interval_with_its_frozen_experts(
    make_service: Callable[..., Service], undisturbed, tmp_path: Path
):
    service = make_service({"demo": RUN})
    service.start()
    # What the flags of the undisturbed run say, this one's file says.
    file = tmp_path / "spes.yaml"
    file.write_text(FILE.format(address=service.address))
    options = {
        **MODEL,
        **{f"sync_service{name}": None for name in ("", "_peers", "_interval")},
        "spes_config": str(file),
        "save": str(tmp_path / "a"),
        "save_interval": 6,
    }
    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(failing_job, service, "a", SINGLE, before=die_in_step(7), **options)
        until(lambda: has_joined(service), "the first peer, which publishes the start")
        other = start_job(service, "b", ("moe-ep2", "bf16-distopt-overlap", 2), sync_service_index=1, **SPES)
        dying.result()
    again = run_job(service, "a", SINGLE, **options, load=str(tmp_path / "a"))
    other.result()
    assert "0 of 2 of the samples, 2 steps after round 1" in again[0].stdout
    assert [event["digest"] for event in service.events("committed")] == [
        event["digest"] for event in undisturbed[0].events("committed")
    ]
    assert same_bits(model_of(again), model_of(undisturbed[1]))


@pytest.mark.slow
def test_a_killed_peer_that_trains_with_sgd_resumes_with_its_momentum(
    make_service: Callable[..., Service], tmp_path: Path
):
    service = make_service({name: {**RUN, "quorum": 1, "grace_seconds": 0.1} for name in ("whole", "killed")})
    service.start()
    options = {"sync_service_index": 0, "optimizer": "sgd", "lr": 0.1, "save_interval": 6, **SPES}
    whole = run_job(service, "a", SINGLE, sync_service_run="whole", save=str(tmp_path / "whole"), **options)
    options |= {"sync_service_run": "killed", "save": str(tmp_path / "killed")}
    failing_job(service, "a", SINGLE, before=die_in_step(7), **options)
    again = run_job(service, "a", SINGLE, load=str(tmp_path / "killed"), **options)
    assert "of the samples, 2 steps after round 1" in again[0].stdout
    assert same_bits(model_of(again), model_of(whole))


def test_the_optimizer_of_another_peers_experts_is_refused(make_service: Callable[..., Service], tmp_path: Path):
    service = make_service({name: {**RUN, "quorum": 1, "grace_seconds": 0.1} for name in ("demo", "other")})
    service.start()
    # The state of this optimizer does not say which parameters it is of.
    kind = ("single", "bf16-distopt", 1)
    run_job(service, "a", kind, sync_service_index=0, train_iters=4, save=str(tmp_path / "a"), save_interval=4, **SPES)
    options = {"sync_service_run": "other", "sync_service_index": 1, "load": str(tmp_path / "a"), "train_iters": 8}
    said = failing_job(service, "b", kind, **options, **SPES)
    assert "its optimizer trained the experts 0, 2, and this peer trains 1, 3" in said
    run_job(service, "b", kind, no_load_optim=True, **options, **SPES)
    alone = {**MODEL, **ALONE, "load": str(tmp_path / "a"), "train_iters": 8}
    said = failing_job(service, "c", kind, **alone)
    assert "a SPES peer saved it, whose optimizer trained the experts 0, 2 alone; take its weights with --no-l" in said
    said = run_job(service, "c", kind, no_load_optim=True, **alone)[0].stdout
    assert "was saved by peer 'a', part 0 of 2 of run 'demo', and has counted the samples of its part alone" in said


def test_own_experts_look_less_loaded_in_the_first_fifth_of_the_training():
    options = {"spes_using_decayed_aux_loss": True, "spes_decayed_factor_update_steps": 100, "train_iters": 1000}
    feature = SpesFeature()
    feature.on_train_start(
        TrainStart(args=completed(**FLAGS, **options), model=[], optimizer=None, scheduler=None, config=None)
    )
    found = {}
    for iteration in (0, 100, 199, 200):
        feature.on_step_start(StepStart(iteration=iteration))
        weights = feature.expert_weights(4)
        found[iteration] = None if weights is None else weights.tolist()
    # Peer 0 of 2 owns the first two of four experts.
    assert found[0] == pytest.approx([0.7, 0.7, 1, 1])
    assert found[100] == found[199] == pytest.approx([0.85, 0.85, 1, 1])
    assert found[200] is None
