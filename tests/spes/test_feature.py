# SPDX-License-Identifier: Apache-2.0
"""SPES inside Megatron: a real server, real toy trainings of mixtures of experts."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.hooks import StepContext, TrainContext
from megatron_ext.spes import Ownership, training_bytes
from megatron_ext.spes.feature import SpesFeature
from tests.spes.test_arguments import FILE, FLAGS, completed
from tests.support.presets import MOE
from tests.support.pretrain import run_pretrain
from tests.sync_service.jobs import (
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
from tests.sync_service.service import Service, Zygote, until

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
        args.steps_seen = [*getattr(args, "steps_seen", []), (changed, graded)]
        return result

    training.train_step = train_step


def values_and_memory(model, optimizer, args):
    """Probe: what `values_held` says, what each step has done, and `memory_held`."""
    memory = memory_held(model, optimizer, args)
    return (*values_held(model, optimizer, args), getattr(args, "steps_seen", []), memory)


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
    alone = {f"sync_service{name}": None for name in ("", "_run", "_peer", "_peers", "_interval", "_round_seconds")}
    words = job_arguments(undisturbed[0], "none", SINGLE, **MODEL, **{**alone, "train_iters": 1})
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


def test_a_peer_uploads_what_it_trains_alone(undisturbed):
    service, first, _ = undisturbed
    model = model_of(first)
    uploaded = {(event["round"], event["peer"]): event["bytes"] for event in service.events("uploaded")}
    everything = 4 * sum(values.size for values in model.values())
    trained = 4 * sum(values.size for name, values in model.items() if expert_of(name) in (None, *OWNED["a"]))
    assert uploaded[0, service.events("joined")[0]["peer"]] > everything
    assert trained < uploaded[1, "a"] < 1.2 * trained < everything


def test_a_killed_peer_goes_on_in_mid_interval_with_its_frozen_experts(
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


def test_own_experts_look_less_loaded_in_the_first_fifth_of_the_training():
    options = {"spes_using_decayed_aux_loss": True, "spes_decayed_factor_update_steps": 100, "train_iters": 1000}
    feature = SpesFeature()
    feature.on_train_start(
        TrainContext(args=completed(**FLAGS, **options), model=[], optimizer=None, scheduler=None, config=None)
    )
    found = {}
    for iteration in (0, 100, 199, 200):
        feature.before_step(StepContext(iteration=iteration))
        weights = feature.expert_weights(4)
        found[iteration] = None if weights is None else weights.tolist()
    # Peer 0 of 2 owns the first two of four experts.
    assert found[0] == pytest.approx([0.7, 0.7, 1, 1])
    assert found[100] == found[199] == pytest.approx([0.85, 0.85, 1, 1])
    assert found[200] is None
