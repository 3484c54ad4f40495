# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the files of a checkpoint is named by file."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_ext.seams.damage import damaged_file


@pytest.fixture
def folder(tmp_path):
    """A checkpoint as Megatron leaves it: torch's files, and two of its own."""
    dcp.save({"weight": torch.arange(1000.0)}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text("{}")
    return tmp_path


def test_a_sound_checkpoint_has_no_damaged_file(folder):
    assert damaged_file(folder) is None


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        ("metadata.json", None, "metadata.json is missing"),
        ("common.pt", 0, "common.pt is empty"),
        (".metadata", None, ".metadata is missing"),
        (".metadata", 20, ".metadata is damaged"),
        ("__0_0.distcp", None, "__0_0.distcp is missing"),
        ("__0_0.distcp", 100, "__0_0.distcp has 100 bytes instead of "),
    ],
)
def test_a_file_that_is_missing_or_cut_off_is_named(folder, name, kept, said):
    file = folder / name
    data = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(data[:kept])
    assert said in damaged_file(folder)
