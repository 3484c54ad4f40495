# SPDX-License-Identifier: Apache-2.0
"""The example of an extension, installed as anybody's package: its feature, reducer and codec are in the next run."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from megatron_ext.outer.codecs.all_codecs import CODECS
from megatron_ext.outer.reducers.all_reducers import REDUCERS
from tests.local_sgd.plain_runs import model, train, wrapped
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.every_run import one_of_each
from tests.support.megatron_checkout import python_path
from tests.support.ports import free_port
from tests.support.presets import LAYOUTS, PRECISIONS, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain
from tests.sync_service.jobs import ALONE, SINGLE, job_arguments, model_of, same_bits, start_job, values_held
from tests.sync_service.service import Service

MakeService = Callable[..., Service]

EXAMPLE = REPOSITORY / "examples" / "extension"
LOGS = {"parameter_norm_interval": 2, "log_params_norm": True}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as pip leaves it; built from a copy, because a build leaves folders behind."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for path in EXAMPLE.rglob("*"):
        if path.suffix in (".py", ".toml"):
            copy = sources / path.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run(
        [*command, "--target", str(target), str(sources)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def launch(installed: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Train with the command that the documentation shows, on one rank, with the package beside the others."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    path = python_path(installed, REPOSITORY)
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext", str(REPOSITORY / "examples" / "pretrain_gpt.py"), *arguments],
        env={**os.environ, **place, "MASTER_PORT": str(free_port()), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def norms(output: str) -> list[tuple[str, str | None, str | None]]:
    """Return (iteration, Megatron's norm, the example's) of every iteration line."""
    found = []
    for line in output.splitlines():
        if match := re.search(r" iteration +(\d+)/", line):
            said = [re.search(rf"\| {label}: ([\d.]+) \|", line) for label in ("params norm", "parameter norm")]
            found.append((match[1], *(None if norm is None else norm[1] for norm in said)))
    return found


def use(installed: Path) -> None:
    """Let this process find the package."""
    sys.path.insert(0, str(installed))


@pytest.mark.slow
def test_an_installed_feature_is_in_the_next_run(installed: Path):
    done = launch(installed, toy_gpt(**LOGS))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = norms(done.stdout)
    assert [iteration for iteration, _, _ in lines] == ["1", "2", "3", "4"]
    assert [own for _, _, own in lines] == [None, lines[1][1], None, lines[3][1]]
    assert lines[1][1] != lines[3][1]


@pytest.mark.parametrize(
    ("layout", "precision"),
    one_of_each([("tp2-sp", "fp32"), ("pp2", "bf16"), ("moe-ep2", "bf16-distopt-overlap")], {2}),
)
def test_each_parameter_counts_once_in_every_layout(installed: Path, layout: str, precision: str):
    arguments = toy_gpt(LAYOUTS[layout].options, PRECISIONS[precision], **LOGS)
    ranks = run_pretrain(arguments, LAYOUTS[layout].world_size(), before=partial(use, installed))
    ((_, stock, own),) = [line for line in norms(ranks[-1].stdout) if line[0] == "4"]
    assert stock is not None and own == stock


def test_its_values_are_checked_with_those_of_the_other_features(installed: Path):
    wrong = {"parameter_norm_interval": 3, "log_interval": 2, "use_local_sgd": True, "local_sgd_workers": 0}
    (ended,) = run_failing_pretrain(toy_gpt(**wrong), 1, before=partial(use, installed))
    assert ended.exit_code not in (0, None)
    assert "arguments: 3 problems" in ended.traceback and "--local-sgd-workers" in ended.traceback
    assert "--parameter-norm-interval 3: give a positive multiple of --log-interval 2" in ended.traceback
    assert "--parameter-norm-interval: workers of local SGD would wait for its sum" in ended.traceback


def use_without_patches(installed: Path) -> None:
    """Let this process find the package, in which somebody has forgotten what raises the events."""
    use(installed)
    from megatron_ext_example.parameter_norm import ParameterNorm

    ParameterNorm.required_patches = lambda self: []


def test_a_feature_that_has_forgotten_its_patches_is_refused_before_training(installed: Path):
    (ended,) = run_failing_pretrain(toy_gpt(**LOGS), 1, before=partial(use_without_patches, installed))
    said = "the feature 'parameter-norm' has what no patch of this run calls: TrainStart, TrainingLog; add the patches"
    assert said in ended.traceback


def test_without_its_flag_it_changes_nothing(installed: Path):
    arguments = toy_gpt()
    with_package = run_pretrain(arguments, 1, before=partial(use, installed), probe=names_in_force)
    without = run_pretrain(arguments, 1, probe=names_in_force)
    assert with_package[0].parameters == without[0].parameters and with_package[0].losses == without[0].losses
    assert with_package[0].probe[1] == without[0].probe[1]
    assert set(with_package[0].probe[0]) - set(without[0].probe[0]) == {"parameter-norm"}


def names_in_force(model, optimizer, args) -> tuple[list[str], list[str]]:
    """Probe: the features that are there, and the patches that are applied."""
    from megatron_ext.activation import registry
    from megatron_ext.hooks import hooks

    return [feature.name for feature in hooks.features], [patch.name for patch in registry().applied]


# -------------------------------------------------------------------------------------------------------------------
# Its reducer and its codec, in every place
# -------------------------------------------------------------------------------------------------------------------

REDUCER, CODEC = "median", "fp24"
OUTER = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7, "outer_optimizer_momentum": 0.6}
INTERVAL, ROUNDS = 3, 3


@pytest.fixture
def service(installed: Path, make_service: MakeService, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A server of two peers that has the package, as this process does."""
    monkeypatch.syspath_prepend(str(installed))
    service = make_service(peers=2, reducer=REDUCER, **OUTER)
    service.packages = str(installed)
    service.start()
    return service


def test_megatron_workers_and_megatron_peers_are_at_the_same_bits(installed: Path, service: Service):
    before = partial(use, installed)
    peers = [start_job(service, f"p{index}", SINGLE, before=before, sync_service_codec=CODEC) for index in range(2)]
    inside = {
        "use_local_sgd": True,
        "local_sgd_workers": 2,
        "local_sgd_sync_interval": 4,
        "local_sgd_pseudo_grad_reducer": REDUCER,
        "local_sgd_codec": CODEC,
        "global_batch_size": 8,
        **OUTER,
        **ALONE,
    }
    arguments = job_arguments(service, "none", SINGLE, **inside)
    workers = [model_of([rank]) for rank in run_pretrain(arguments, 2, before=before, probe=values_held)]
    found = [model_of(peer.result()) for peer in peers]
    assert all(same_bits(workers[0], other) for other in (workers[1], *found))
    mean = run_pretrain([*arguments, "--local-sgd-pseudo-grad-reducer", "linear"], 2, before=before, probe=values_held)
    assert not same_bits(workers[0], model_of(mean[:1]))


def in_plain_torch(installed: Path, reducer: str, codec: str | None) -> dict[str, list[float]]:
    """Return a worker's parameters after rounds without Megatron."""
    import torch
    import torch.distributed as dist

    use(installed)
    dist.init_process_group("gloo")
    module = model()
    inner = torch.optim.SGD(module.parameters(), lr=0.05)
    optimizer = wrapped(inner, module, interval=INTERVAL, outer=OUTER, gta={"reducer": reducer}, codec=codec)
    train(module, optimizer, ROUNDS * INTERVAL, dist.get_rank())
    return {name: value.detach().reshape(-1).tolist() for name, value in module.named_parameters()}


def in_an_engine(installed: Path) -> dict[str, list[float]]:
    """Return a worker's parameters after rounds of the engine that Megatron's jobs have."""
    import torch

    from tests.local_sgd.engines import engine_of

    use(installed)
    torch.distributed.init_process_group("gloo")
    module = model()
    values = [value.detach() for value in module.parameters()]
    engine = engine_of(values, penalty={"codec": CODEC}, gta={"reducer": REDUCER}, **OUTER)
    engine.take_anchor()
    for number in range(ROUNDS):
        inner = torch.optim.SGD(module.parameters(), lr=0.05)
        start = number * INTERVAL
        train(module, inner, start + INTERVAL, torch.distributed.get_rank(), start=start)
        engine.sync()
    return {name: value.detach().reshape(-1).tolist() for name, value in module.named_parameters()}


def at_a_server(service: Service, index: int) -> dict[str, list[float]]:
    """Return a peer's parameters after rounds."""
    import torch

    module = model()
    values = {name: value.detach() for name, value in module.named_parameters()}
    with service.client(f"p{index}", values, index=index, codec=CODEC) as client:
        client.start(values)
        for number in range(ROUNDS):
            inner = torch.optim.SGD(module.parameters(), lr=0.05)
            start = number * INTERVAL
            train(module, inner, start + INTERVAL, index, start=start)
            for name, value in client.sync(values).values.items():
                values[name].copy_(value)
    return {name: value.reshape(-1).tolist() for name, value in values.items()}


def test_plain_workers_peers_and_the_engine_of_jobs_are_at_the_same_bits(installed: Path, service: Service):
    with ThreadPoolExecutor(2) as pool:
        peers = list(pool.map(partial(at_a_server, service), range(2)))
    assert peers[0] == peers[1]
    assert run_ranks(in_plain_torch, 2, installed, REDUCER, CODEC) == peers
    assert run_ranks(in_an_engine, 2, installed) == peers
    for other in (("linear", CODEC), (REDUCER, None)):
        assert run_ranks(in_plain_torch, 2, installed, *other)[0] != peers[0]


def test_a_run_without_the_package_is_told_the_names_that_there_are():
    (ended,) = run_failing_pretrain(toy_gpt(local_sgd_codec=CODEC), 1)
    assert ended.exit_code not in (0, None)
    said = "argument --local-sgd-codec: invalid choice: 'fp24' (choose from 'bf16', 'fp16', 'fp8', 'int8', 'int4', "
    assert said in ended.stderr


def test_its_codec_rounds_to_the_nearest_and_its_median_is_one_of_the_values(
    installed: Path, monkeypatch: pytest.MonkeyPatch
):
    import torch

    monkeypatch.syspath_prepend(str(installed))
    codec, median = CODECS.find(CODEC)(), REDUCERS.find(REDUCER)()
    values = torch.tensor([1.0, 1 + 2**-16, 1 + 3 * 2**-16, -3.4e38, torch.finfo(torch.float32).max])
    decoded = codec.decode(codec.encode(values), 5)
    assert decoded[:3].tolist() == [1.0, 1.0, 1 + 2**-14] and decoded.isfinite().all()
    for terms, weights, wanted in (
        ([1.0, 9.0, 2.0], [1.0, 1.0, 1.0], 2.0),
        ([1.0, 9.0, 2.0], [1.0, 3.0, 1.0], 9.0),
        ([-4.0, 3.0], [1.0, 1.0], 3.0),
        ([5.0, 1.0], [0.0, 1.0], 1.0),
    ):
        assert median([torch.tensor([term]) for term in terms], weights).tolist() == [wanted]
