# SPDX-License-Identifier: Apache-2.0
"""Workers on samples of several documents, of which attention keeps to one: on a double of Transformer Engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hot_switch.data.test_conversations import (  # noqa: F401  # fixtures
    folder,
    of_conversations,
    the_data,
    with_datasets,
)
from tests.local_sgd.runs import arguments, same_state, worker_slices
from tests.support.corpus import write_without_record
from tests.support.every_run import one_of_each
from tests.support.presets import LAYOUTS, Options
from tests.support.pretrain import RankOutcome, as_worker, run_pretrain
from tests.support.transformer_engine import accept_transformer_engine
from tests.transport.meter import crossing_calls, install_meter

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

ON_THE_DOUBLE: Options = {
    "transformer_impl": "transformer_engine",
    "position_embedding_type": "rope",
    "no_rope_fusion": True,
}
LONGEST = 20


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Options for documents of 2 to 20 tokens in samples of 32."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 120, size=size).tolist() for size in rng.integers(2, LONGEST + 1, size=400)]
    prefix = write_without_record(tmp_path_factory.mktemp("documents") / "short", documents)
    options = {"mock_data": False, "data_path": [prefix], "split": "90,10,0"}
    return {**ON_THE_DOUBLE, **options, "dataloader_inter_document_masking": True}


def remember_counted_lengths() -> None:
    """Keep what the log counts operations of."""
    from megatron.training import training

    count = training.num_floating_point_operations

    @functools.wraps(count)
    def remember(*args: Any, **kwargs: Any) -> Any:
        COUNTED.append((kwargs["total_real_tokens_in_batch"], kwargs["seqlen_squared_sum_in_batch"]))
        return count(*args, **kwargs)

    training.num_floating_point_operations = remember


COUNTED: list[tuple[float, float]] = []


def counted_lengths(model: Any, optimizer: Any, args: Any) -> list[tuple[float, float]]:
    """Probe: tokens of an iteration's documents, and squares of their lengths."""
    return COUNTED


def run(layout: str, workers: int | None, options: Options, **more: Any) -> list[RankOutcome]:
    before = more.pop("before", ())
    patch, probe = more.pop("patch", "script"), more.pop("probe", counted_lengths)
    command = arguments(layout, "bf16-distopt", workers=workers, **{**options, **more})
    first = (accept_transformer_engine, remember_counted_lengths)
    world_size = LAYOUTS[layout].world_size(workers or 1)
    return run_pretrain(command, world_size, before=(*first, *before), probe=probe, patch=patch)


@pytest.mark.parametrize("layout", one_of_each(["dp2", "tp2-sp", "pp2", "moe-ep2"], {1, 2}))
def test_a_worker_keeps_documents_apart_as_a_stock_job_does(layout: str, masked: Options):
    if layout == "pp2":  # Megatron's stages send each other samples that are not one behind the other
        masked = {**masked, "micro_batch_size": 1}
    together = run(layout, 2, masked, local_sgd_sync_interval=100)
    for worker, ranks in enumerate(worker_slices(together, layout, 2)):
        alone = run(layout, None, masked, patch="backend-only", before=(as_worker(worker, 2),))
        assert same_state(ranks, alone)
        for ours, stock in zip(ranks, alone, strict=True):
            # As many as a job of two of these workers would have, if the other one's documents were as long.
            assert [tokens for tokens, _ in ours.probe] == [2 * tokens for tokens, _ in stock.probe]
            assert [squares for _, squares in ours.probe] == [2 * squares for _, squares in stock.probe]
            assert all(0 < squares <= LONGEST * tokens for tokens, squares in ours.probe)


def test_attention_across_documents_would_train_other_weights(masked: Options):
    apart = run("dp2", None, masked, patch="backend-only")
    through = run("dp2", None, {**masked, "dataloader_inter_document_masking": None}, patch="backend-only")
    assert apart[0].losses[0] != through[0].losses[0]


def test_steps_without_a_round_cross_workers_zero_times(masked: Options):
    ranks = run(
        "dp2",
        2,
        masked,
        train_iters=8,
        local_sgd_sync_interval=4,
        log_interval=100,
        before=(install_meter,),
        probe=crossing_calls,
    )
    for rank in ranks:
        assert [index for index, calls in enumerate(rank.probe) if calls and index > 0] == [3, 7], rank.probe


def test_workers_end_equal_and_a_resume_in_mid_interval_keeps_the_bits(tmp_path: Path, masked: Options):
    options = {**masked, "train_iters": 6, "local_sgd_sync_interval": 3, "eval_iters": 1, "eval_interval": 3}
    through = run("dp2", 2, options, save=str(tmp_path), save_interval=4)
    assert all(rank.parameters == through[0].parameters for rank in through)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = run("dp2", 2, options, load=str(tmp_path))
    assert same_state(through, resumed)
    assert [rank.losses[4:] for rank in through] == [rank.losses for rank in resumed]


def test_workers_on_conversations_end_equal_and_resume(
    tmp_path: Path,
    folder: Path,  # noqa: F811  # fixtures that are imported have the arguments' names
    with_datasets: Any,  # noqa: F811  # likewise
):
    options = {
        **ON_THE_DOUBLE,
        **of_conversations(folder, **the_data(folder)),
        "micro_batch_size": 1,
        "local_sgd_sync_interval": 3,
        "eval_iters": 1,
        "eval_interval": 3,
    }
    through = run("dp2", 2, options, save=str(tmp_path), save_interval=4, before=(with_datasets,))
    assert all(rank.parameters == through[0].parameters for rank in through)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = run("dp2", 2, options, load=str(tmp_path), before=(with_datasets,))
    assert same_state(through, resumed)
