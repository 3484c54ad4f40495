# SPDX-License-Identifier: Apache-2.0
"""`--dist-ckpt-strictness log_all` and the like: differences are logged; what the workers need is whole or refused."""

import pickle
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.every_run import one_of_each
from tests.support.pretrain import run_failing_pretrain

OPTIONS = {"train_iters": 6, "local_sgd_sync_interval": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where two workers saved after iterations 2 (in mid-interval) and 4, and how they ended."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, local_run("single", "bf16-distopt", workers=2, save=str(folder), save_interval=2, **OPTIONS)


@pytest.mark.parametrize("strictness", ["log_all", "log_unexpected", "ignore_all"])
def test_a_resume_that_only_logs_differences_keeps_its_bits(saved, strictness):
    folder, through = saved
    reading = {"load": str(folder), "ckpt_step": 2, "dist_ckpt_strictness": strictness}
    assert same_state(local_run("single", "bf16-distopt", workers=2, **reading, **OPTIONS), through)


@pytest.mark.parametrize("strictness", one_of_each(["log_all", "log_unexpected", "ignore_all"], {0}))
def test_what_a_worker_needs_is_refused_by_name_where_a_checkpoint_lacks_it(saved, tmp_path, strictness):
    folder, _ = saved
    damaged = tmp_path / "iter_0000002"
    damaged.mkdir()
    for file in (folder / "iter_0000002").iterdir():
        (damaged / file.name).symlink_to(file)
    forget(damaged, "local_sgd.worker_1.")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    reading = {"load": str(tmp_path), "dist_ckpt_strictness": strictness}
    exits = run_failing_pretrain(arguments("single", "bf16-distopt", workers=2, **reading, **OPTIONS), 2)
    errors = "".join(rank.stderr for rank in exits)
    assert f"--load {tmp_path}: the checkpoint lacks local_sgd.worker_1." in errors
    assert errors.count("megatron-ext: error: ") == 1


def forget(folder: Path, prefix: str) -> None:
    """Take all entries of a name out of what a checkpoint says that it has."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata = {
        name: entry for name, entry in metadata.state_dict_metadata.items() if not name.startswith(prefix)
    }
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if not index.fqn.startswith(prefix)
    }
    file.unlink()
    file.write_bytes(pickle.dumps(metadata))
