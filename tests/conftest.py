# SPDX-License-Identifier: Apache-2.0
"""Guards of the whole session: no module without tests, no process left behind, GPU tests skipped."""

import gc
import importlib.util
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import megatron_checkout
from tests.support.processes import SESSION_MARK, session_processes

VANISH_SECONDS = 15.0
"""How long processes may still be ending after the last test."""

_empty_collectors: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests that throw dice run for longer, and all of them against another Megatron."""
    parser.addoption("--fuzz-seconds", type=float, default=1.0, help="how long each test marked fuzz runs (1)")
    parser.addoption("--exhaustive", action="store_true", help="also run the tests marked exhaustive")
    parser.addoption("--megatron", metavar="CHECKOUT", help="a Megatron-LM checkout to test against")


def pytest_configure(config: pytest.Config) -> None:
    """Mark this session's environment, and ask nothing of the clock: machines that run tests are busy."""
    os.environ[SESSION_MARK] = uuid.uuid4().hex
    if config.getoption("--megatron"):
        checkout = megatron_checkout.use(Path(config.invocation_params.dir, config.getoption("--megatron")))
        checkout.__enter__()
        config.add_cleanup(lambda: checkout.__exit__(None, None, None))
    # A shell ignores interrupts for what it starts in the background, and all processes from there would, too.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time: a change is judged by what it changes. The other profile looks for new ones.
    # Where slow tests are left out, so are most of these.
    examples = 40 if config.getoption("-m") == "not slow" else 100
    settings.register_profile("same", deadline=None, derandomize=True, max_examples=examples)
    settings.register_profile("search", deadline=None, max_examples=1000)
    settings.load_profile(config.getoption("--hypothesis-profile") or "same")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember modules and classes that were collected without an error and without a test."""
    path = report.nodeid.partition("::")[0]
    if path.endswith(".py") and report.passed and not report.result:
        _empty_collectors.append(report.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is exhaustive unless asked for; skip tests that need a GPU where there is none."""
    if not config.getoption("--exhaustive"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # slow, and most sessions without GPU tests need it in the ranks only

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse modules without tests; start to warm the ranks up while the first tests run."""
    if _empty_collectors:
        raise pytest.UsageError("collected without any test: " + ", ".join(_empty_collectors))
    distributed = sys.modules.get("tests.support.distributed")
    if distributed is not None and session.items and not session.config.option.collectonly:
        distributed.warm_up()


@pytest.fixture(scope="module")
def transformer_engine() -> None:
    """Skip where there is no Transformer Engine itself: it is compiled against torch and CUDA, and CI has neither."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine, which is not installed")


@pytest.fixture(scope="module")
def double_of_transformer_engine() -> Iterator[None]:
    """Let all ranks of a module find the double, and Megatron build its Transformer Engine layers on it."""
    from tests.support.distributed import REPOSITORY, server_with_packages  # slow, as above

    with server_with_packages(REPOSITORY / "tests" / "doubles"):
        yield


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session whose tests left processes behind, and end those."""
    if getattr(session.config.option, "dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        return  # With pytest-xdist the workers run the tests, and look after them.
    mark = os.environ[SESSION_MARK]
    deadline = time.monotonic() + VANISH_SECONDS
    while (leftovers := session_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in leftovers:
        print(f"\nERROR: left behind by the tests and killed now: process {process}", file=sys.stderr)
        with suppress(ProcessLookupError):  # it ended at last
            os.kill(process.pid, signal.SIGKILL)
    if leftovers:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    # Pytest is about to look for garbage five times, among all of torch.
    gc.collect()
    gc.freeze()
