# SPDX-License-Identifier: Apache-2.0
"""Workers in a job and peers at a server that bring the same values are at the same place after every round."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from tests.support.distributed import run_ranks
from tests.sync_service.service import Service, Zygote

Round = dict[str, list[float]]

WORKERS, ROUNDS = 3, 4
SHAPES = {"layer.0.w": (40, 30), "layer.0.b": (7,), "layer.1.w": (500,)}
WHOLE = {f"layer.0.w{index}": (32, 48) for index in range(WORKERS)}
"""Of which every worker owns one: codecs of blocks lay their grid from the first element that a worker owns, and
sparsification looks at what it owns of a tensor."""

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "mean": {"outer": {"outer_optimizer": "none"}},
    "nesterov": {},
    "adam": {"outer": {"outer_optimizer": "adam", "outer_optimizer_lr": 0.01}},
    "one left out": {"penalty": {"skip_anomaly": True, "ewma_warmup_steps": 2, "ewma_alpha": 0.5}},
    "mean with one left out": {
        "outer": {"outer_optimizer": "none"},
        "penalty": {"skip_anomaly": True, "ewma_warmup_steps": 2, "ewma_alpha": 0.5, "clip_pseudo_grad": 1e6},
    },
}
"""By name, what differs from DiLoCo: fields of `OuterOptimizerConfig` and of the penalty."""

REDUCERS: dict[str, dict[str, Any]] = {
    "linear": {"reducer": "linear"},
    "sum": {"reducer": "gta", "consensus_method": "sum"},
    "count": {"reducer": "gta", "consensus_method": "count", "int8_mask": True},
    "magnitude": {"reducer": "gta", "sparsification_method": "magnitude", "density": 0.3},
    "random": {"reducer": "gta", "sparsification_method": "random", "density": 0.3},
    "rescaled random": {"reducer": "gta", "sparsification_method": "rescaled_random", "density": 0.3},
}
"""By name, fields of `GTAConfig`."""

EVERYTHING: dict[str, dict[str, dict[str, Any]]] = {
    f"{reducer} in {codec}": {"gta": fields, "penalty": {} if codec == "fp32" else {"codec": codec}}
    for reducer, fields in REDUCERS.items()
    for codec in CODECS.own_names
}

SAME: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"gta": {"reducer": "linear"}},
    "a guard that is silent": {"penalty": {"skip_anomaly": True, "ewma_warmup_steps": 100}},
}
"""Those that come out as if they were not asked for."""

CLOSE: dict[str, dict[str, dict[str, Any]]] = {
    "weights by norms": {"penalty": {"pseudo_gradnorm_reduce": True, "weight_scale_free": True}},
    "a sum by norms": {
        "gta": {"reducer": "gta", "consensus_method": "sum", "normalize": False},
        "penalty": {"pseudo_gradnorm_reduce": True},
    },
    "clipped": {"penalty": {"clip_pseudo_grad": 1.0}},
    "clipped mean": {"outer": {"outer_optimizer": "none"}, "penalty": {"clip_pseudo_grad": 1.0}},
}
"""Those in which values depend on norms, which workers add up over other parts than the server does."""


def shapes_of(settings: dict[str, dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    return WHOLE if settings in EVERYTHING.values() else SHAPES


def start(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the values that all begin with."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def train(values: dict[str, torch.Tensor], worker: int, number: int) -> None:
    """Change the values as a worker's steps before a round might: every one's otherwise, and once one's far too far."""
    generator = torch.Generator().manual_seed(100 * number + worker)
    size = 3.0 if (worker, number) == (1, 3) else 0.1
    for value in values.values():
        value += size * torch.randn(value.shape, generator=generator)


def written(values: dict[str, torch.Tensor]) -> Round:
    return {name: value.reshape(-1).tolist() for name, value in values.items()}


def in_jobs(folder: Path, cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write down this worker's values after every round, case by case."""
    import torch.distributed as dist

    from tests.local_sgd.engines import engine_of, start_groups

    groups, found = start_groups(), {}
    for name, settings in cases.items():
        values = start(shapes_of(settings))
        units = [name.rpartition(".")[0] for name in values]
        kinds = {kind: fields for kind, fields in settings.items() if kind != "outer"}
        named = {"units": units, "names": list(values), "groups": groups}
        engine = engine_of(list(values.values()), **named, **kinds, **settings.get("outer", {}))
        engine.take_anchor()
        rounds = found[name] = []
        for number in range(1, ROUNDS + 1):
            train(values, dist.get_rank(), number)
            engine.sync()
            rounds.append(written(values))
    (folder / f"worker{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Round]]]:
    """Return by worker and case the values after every round of a job."""
    folder = tmp_path_factory.mktemp("workers")
    run_ranks(in_jobs, WORKERS, folder, CASES | EVERYTHING | CLOSE | SAME)
    return [json.loads((folder / f"worker{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.fixture(scope="module")
def service(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a server that has a run for every case."""
    cases = CASES | EVERYTHING | CLOSE
    runs = {_slug(name): run_of(settings) for name, settings in cases.items()}
    found = Service(zygote, tmp_path_factory.mktemp("service"), runs)
    found.start()
    yield found
    found.stop()


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def of_peers(service: Service, name: str, settings: dict[str, dict[str, Any]]) -> list[list[Round]]:
    """Return by peer the values after every round of a case's run."""
    shapes, codec = shapes_of(settings), settings.get("penalty", {}).get("codec", "fp32")
    specs = [TensorSpec(name=name, shape=shape, unit=name.rpartition(".")[0]) for name, shape in shapes.items()]

    def peer(index: int) -> list[Round]:
        values, found = start(shapes), []
        with service.client(f"p{index}", Catalog(specs), run=_slug(name), index=index, codec=codec) as client:
            client.start(values)
            for number in range(1, ROUNDS + 1):
                train(values, index, number)
                values = {name: value.clone() for name, value in client.sync(values).values.items()}
                found.append(written(values))
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(peer, range(WORKERS)))


def run_of(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the server's settings of a run that does what a job with these does."""
    guards = {name: value for name, value in settings.get("penalty", {}).items() if name != "codec"}
    outer = {"outer_optimizer": "sgd", **settings.get("outer", {})}
    return {"peers": WORKERS, **outer, **settings.get("gta", {}), **guards}


@pytest.mark.parametrize("name", [*CASES, *EVERYTHING])
def test_workers_and_peers_are_at_the_same_place_to_the_last_bit(
    service: Service, of_workers: list[dict[str, list[Round]]], name: str
):
    for peer in of_peers(service, name, (CASES | EVERYTHING)[name]):
        for worker in of_workers:
            assert peer == worker[name]


@pytest.mark.parametrize("name", list(SAME))
def test_the_default_is_the_linear_reducer_and_a_silent_guard_changes_no_bit(
    of_workers: list[dict[str, list[Round]]], name: str
):
    for worker in of_workers:
        assert worker[name] == worker["nesterov"]


@pytest.mark.parametrize("name", list(CLOSE))
def test_workers_and_peers_are_weighted_and_clipped_alike(
    service: Service, of_workers: list[dict[str, list[Round]]], name: str
):
    (first, *others) = of_peers(service, name, CLOSE[name])
    assert others == [first] * (WORKERS - 1)
    for found, wanted in zip(first, of_workers[0][name], strict=True):
        for tensor, values in wanted.items():
            assert found[tensor] == pytest.approx(values, rel=1e-5, abs=1e-6)
