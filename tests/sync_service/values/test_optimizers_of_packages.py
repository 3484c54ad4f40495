# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer of another package moves anchors alike in a job and at a server, also after the server's end."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.outer.places import Where
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from tests.support.distributed import run_ranks
from tests.support.packages import write_package
from tests.sync_service.service import Service
from tests.sync_service.values.test_workers_and_peers import SHAPES, Round, start, train, written

MakeService = Callable[..., Service]
PEERS, ROUNDS = 2, 4

OURS = """
import torch
from megatron_ext.outer.optimizers.base import OuterOptimizer
from megatron_ext.outer.places import Where

class Own(OuterOptimizer):
    name = "their-step"
    options = ("lr", "momentum")
    default_lr = 0.5
    elementwise = True
    refused_in = {
        Where.PLAIN: "it needs Megatron's names",
        Where.ASYNCHRONOUS: "it averages over peers",
    }

    def __init__(self, anchors, *, lr, momentum):
        super().__init__(anchors)
        self._lr, self._decay = lr, momentum
        self._means = [torch.zeros_like(anchor) for anchor in anchors]

    def step(self, index, part, gradient):
        mean = self._means[index][part].lerp_(gradient, 1 - self._decay)
        self._anchors[index][part].sub_(mean, alpha=self._lr)

    def states(self, index):
        return [self._means[index]]

    def tensor_state(self):
        return {"mean": self._means}

    def load(self, tensors, scalars):
        for mean, loaded in zip(self._means, tensors.get("mean", self._means), strict=True):
            mean.copy_(loaded)
"""
OF_TORCH = """
import torch

class Own(torch.optim.RMSprop):
    pass
"""
KINDS = {"an outer optimizer": (OURS, {}), "one of torch's": (OF_TORCH, {"outer_optimizer_lr": 0.01})}
"""By what it is, the module, and the options that it needs."""


@pytest.fixture(params=list(KINDS))
def package(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, object]]:
    """The folder of a package with an outer optimizer, and the options that ask for it."""
    code, options = KINDS[request.param]
    folder = tmp_path / "packages"
    folder.mkdir()
    write_package(folder, "outer_optimizers", "their_step", code, "their_step:Own", "their-step")
    return str(folder), {"outer_optimizer": "their-step", **options}


def in_a_job(folder: str, options: dict[str, object]) -> list[Round]:
    """Return a worker's values after every round."""
    import sys

    import torch.distributed as dist

    from tests.local_sgd.engines import engine_of, start_groups

    sys.path.insert(0, folder)
    groups, values, rounds = start_groups(), start(SHAPES), []
    units = [name.rpartition(".")[0] for name in values]
    engine = engine_of(list(values.values()), units=units, groups=groups, **options)
    engine.take_anchor()
    for number in range(1, ROUNDS + 1):
        train(values, dist.get_rank(), number)
        engine.sync()
        rounds.append(written(values))
    return rounds


def test_workers_and_peers_are_at_the_same_bits_and_a_server_resumes(
    make_service: MakeService, package: tuple[str, dict[str, object]]
):
    folder, options = package
    service = make_service(peers=PEERS, **options)
    service.packages = folder
    service.start()
    specs = [TensorSpec(name=name, shape=shape, unit=name.rpartition(".")[0]) for name, shape in SHAPES.items()]
    clients = [service.client(f"p{index}", Catalog(specs), index=index) for index in range(PEERS)]
    rounds: list[list[Round]] = [[], []]
    values = [start(SHAPES) for _ in clients]
    with ThreadPoolExecutor(PEERS) as pool:
        list(pool.map(lambda index: clients[index].start(values[index]), range(PEERS)))
        for number in range(1, ROUNDS + 1):

            def meet(index: int, number: int = number) -> None:
                train(values[index], index, number)
                found = clients[index].sync(values[index]).values
                values[index] = {name: value.clone() for name, value in found.items()}
                rounds[index].append(written(values[index]))

            list(pool.map(meet, range(PEERS)))
            if number == 2:
                assert service.server is not None
                service.server.kill()
                service.server.wait()
                service.start()
    for client in clients:
        client.close()
    assert rounds[0] == rounds[1] and rounds[0][0] != rounds[0][1]
    assert run_ranks(in_a_job, PEERS, folder, options) == rounds


def test_where_its_class_says_that_it_does_not_work_it_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_package(tmp_path, "outer_optimizers", "their_step", OURS, "their_step:Own", "their-step")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2)
    asked = (config, OuterOptimizerConfig(outer_optimizer="their-step"), GTAConfig(), StreamingConfig())
    assert method_problems(*asked, Where.JOB) == []
    said = "--outer-optimizer their-step does not work in plain PyTorch: it needs Megatron's names; use sgd or adam or "
    (problem,) = method_problems(*asked, Where.PLAIN)
    assert problem == said + "adamw or none"
