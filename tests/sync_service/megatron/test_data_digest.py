# SPDX-License-Identifier: Apache-2.0
"""What the training data are is the same wherever a machine has the files, and not what others are."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.megatron.data_digest import data_digest
from tests.sync_service.jobs import SINGLE, die_in_step, failing_job, run_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]


def corpus(prefix: Path, token: int, documents: int = 40) -> str:
    """Write documents of the same lengths for every token, as Megatron would; return their prefix."""
    prefix.parent.mkdir(exist_ok=True)
    lengths = np.full(documents, 100, np.int32)
    pointers, bounds = np.arange(documents) * 400, np.arange(documents + 1)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, documents, documents + 1)
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    prefix.with_suffix(".bin").write_bytes(np.full(100 * documents, token, np.int32).tobytes())
    return str(prefix)


def digest(**given: Any) -> str:
    """Return the digest of a job with these options."""
    options = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    return data_digest(SimpleNamespace(**{**dict.fromkeys(options), "mock_data": False, **given}))


def test_the_same_files_elsewhere_are_the_same_data(tmp_path: Path):
    one = corpus(tmp_path / "one", 1)
    shutil.copytree(tmp_path, tmp_path / "mounted")
    assert digest(data_path=[one]) == digest(data_path=[str(tmp_path / "mounted" / "one")])
    assert digest(data_path=["s3://here/corpus"]) == digest(data_path=["s3://there/corpus"])


def test_a_list_of_corpora_is_the_same_data_wherever_it_is_written(tmp_path: Path):
    words = ["30", corpus(tmp_path / "one", 1), "70.0", corpus(tmp_path / "two", 2)]
    (tmp_path / "list").write_text(" ".join(words))
    (tmp_path / "splits.json").write_text(json.dumps({"train": words, "valid": ["valid"]}))
    assert digest(data_path=words) == digest(data_args_path=str(tmp_path / "list"))
    assert digest(train_data_path=words) == digest(per_split_data_args_path=str(tmp_path / "splits.json"))


def test_weights_count_as_numbers_and_corpora_named_like_numbers_by_their_names(tmp_path: Path):
    one, two = corpus(tmp_path / "one", 1), corpus(tmp_path / "two", 2)
    (tmp_path / "list").write_text(f"1.0 {one} 5E-1 {two}")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [1, one, 0.50, two]}))
    same = [
        {"data_path": ["1", one, "0.5", two]},
        {"data_path": ["1.0", one, "+.50", two]},
        {"data_args_path": str(tmp_path / "list")},
        {"per_split_data_args_path": str(tmp_path / "splits.json")},
    ]
    assert len({digest(**given) for given in same}) == 1
    assert digest(data_path=["1", one, "0.5", two]) != digest(data_path=["1", one, "0.50001", two])
    # Without weights, or with an odd number of words, these are names.
    assert digest(data_path=["1"]) != digest(data_path=["1.0"])
    assert digest(data_path=["1", one, two]) != digest(data_path=["1.0", one, two])
    assert digest(data_path=["1", one, "two", two]) != digest(data_path=["1.0", one, "two", two])


def test_other_data_have_another_digest(tmp_path: Path):
    one, two = corpus(tmp_path / "one", 1), corpus(tmp_path / "two", 2)
    longer = corpus(tmp_path / "longer", 1, documents=41)
    different = [
        {"data_path": [one]},
        {"data_path": [two]},
        {"data_path": [longer]},
        {"data_path": [one, two]},
        {"data_path": [two, one]},
        {"data_path": ["30", one, "70", two]},
        {"data_path": ["40", one, "60", two]},
        {"data_path": ["s3://here/corpus"]},
        {"mock_data": True},
        {},
    ]
    assert len({digest(**given) for given in different}) == len(different)


@pytest.mark.parametrize(
    "content", [None, "[1]", "{", '{"train": 1}'], ids=["missing", "a list", "no JSON", "a number"]
)
def test_a_list_of_corpora_that_cannot_be_read_is_named(tmp_path: Path, content: str | None):
    path = tmp_path / "splits.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"the training data cannot be read: .*; name files that this job can read"):
        digest(per_split_data_args_path=str(path))


def test_a_job_with_other_data_continues_a_run_only_where_it_says_so(make_service: MakeService, tmp_path: Path):
    service = make_service(peers=1)
    service.start()
    data = {"mock_data": None, "split": "100,0,0", "data_path": [corpus(tmp_path / "one", 1)]}
    failing_job(service, "a", SINGLE, before=die_in_step(5), **data)
    data["data_path"] = [corpus(tmp_path / "two", 2)]
    said = failing_job(service, "a", SINGLE, **data)
    assert "the training data of peer 'a' are" in said and "--sync-service-continue-run" in said
    assert len(service.events("joined")) == 1
    (rank,) = run_job(service, "a", SINGLE, sync_service_continue_run=True, **data)
    assert [step.iteration for step in rank.record.steps] == [5, 6, 7, 8]
