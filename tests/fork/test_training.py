# SPDX-License-Identifier: Apache-2.0
"""A fork that calls the wrappers itself trains with the bits of run-time patching; without our flags, with stock's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest

from megatron_ext.fork.apply_set import apply, patch_of
from megatron_ext.fork.source import ForkSource
from tests.local_sgd.runs import arguments
from tests.support.distributed import REPOSITORY, server_with_packages
from tests.support.pretrain import RankOutcome, run_pretrain

MEGATRON = Path(megatron.core.__path__[0]).parent
LOCAL = arguments(
    "single",
    "bf16",
    workers=2,
    train_iters=4,
    local_sgd_sync_interval=2,
    use_distributed_optimizer=True,
    num_experts=2,
    moe_aux_loss_coeff=1e-2,
    disable_bias_linear=True,
    eval_iters=1,
    eval_interval=2,
)
STOCK = arguments("single", "bf16", workers=None, train_iters=2)


def in_force(_model: object, _optimizer: object, _args: object) -> list[tuple[str, bool, bool, tuple[str, ...]]]:
    """Return name, whether it takes a hook point, whether it is at one, and copies, of each patch of Megatron's."""
    from megatron_ext.activation import registry

    statuses = registry().explain(registry().applied)
    return [
        (status.patch.target, status.patch.takes_hook_point, status.hook_point, status.rebound)
        for status in statuses
        if status.patch.distribution == "megatron-core"
    ]


def bits(ranks: list[RankOutcome]) -> list[object]:
    return [(rank.losses, rank.grad_norms, rank.parameters, rank.optimizer) for rank in ranks]


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let a copy of the installed Megatron call the wrappers itself, and take that out of it again."""
    folder = tmp_path_factory.mktemp("fork")
    shutil.copytree(MEGATRON, folder / "megatron")
    patch = patch_of(ForkSource(folder), REPOSITORY / "patches")
    apply(folder, patch, reverse=False, write=True)
    yield folder


@pytest.mark.slow
def test_both_ways_of_patching_train_with_the_same_bits(fork: Path):
    at_run_time = run_pretrain(LOCAL, 2, probe=in_force)
    stock = run_pretrain(STOCK, 1, patch="backend-only")
    with server_with_packages(fork):
        by_itself = run_pretrain(LOCAL, 2, probe=in_force)
        without_flags = run_pretrain(STOCK, 1)
    assert bits(by_itself) == bits(at_run_time)
    assert bits(without_flags) == bits(stock)
    assert not any(hooked for rank in at_run_time for _, _, hooked, _ in rank.probe)
    for rank in by_itself:
        assert len(rank.probe) > 40
        assert [target for target, takes, hooked, _ in rank.probe if takes != hooked] == []
        assert [copies for _, _, _, copies in rank.probe if copies] == []
