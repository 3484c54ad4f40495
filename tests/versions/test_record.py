# SPDX-License-Identifier: Apache-2.0
"""docs/versions.md says what ran, and "not tested" of what did not."""

import dataclasses
import subprocess
import sys

from packaging.specifiers import SpecifierSet

from megatron_ext.patching import MEGATRON_VERSIONS
from tests.support.distributed import REPOSITORY
from tests.versions.features import FEATURES
from tests.versions.record import PAGE, ReleaseRecord, page, read_records, write_records

RECORD = ReleaseRecord(
    release="0.18.2",
    commit="",
    date="2026-01-02",
    patches=9,
    misfits=["a/patch"],
    unavailable={"model/build": "megatron-core 0.18.2 has no builder"},
    tests={},
)


def row(record):
    """Return the cells of the table on a release."""
    (line,) = (line for line in page([record]).splitlines() if line.startswith(f"| {record.release} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == page(read_records())


def test_every_release_that_is_let_in_has_a_record():
    seen = {record.release.rpartition(".")[0] for record in read_records()}
    assert seen == {f"0.{minor}" for minor in range(100) if f"0.{minor}" in SpecifierSet(MEGATRON_VERSIONS)}


def test_what_did_not_run_is_not_tested():
    assert row(RECORD) == ["0.18.2", "package of the index", "2026-01-02", "7 of 9"] + ["not tested"] * len(FEATURES)


def test_failures_are_counted_and_named_and_what_is_unavailable_has_its_reason():
    passed, failed = FEATURES["local SGD"][:2]
    record = dataclasses.replace(RECORD, tests={f"{passed}[x]": "passed", f"{passed}[y]": "passed", failed: "failed"})
    assert row(record)[4 + list(FEATURES).index("local SGD")] == "2 passed, 1 failed"
    lines = page([record]).splitlines()
    assert f"- failed: `{failed}`" in lines
    assert "- does not fit: `a/patch`" in lines
    assert "- unavailable: `model/build`: megatron-core 0.18.2 has no builder" in lines


def test_records_are_read_as_they_were_written(tmp_path):
    newer = dataclasses.replace(RECORD, release="0.20.0", commit="d98e8a64")
    write_records([RECORD, newer], tmp_path / "records.json")
    assert read_records(tmp_path / "records.json") == [newer, RECORD]


def test_every_test_that_is_run_exists():
    wanted = [test for tests in FEATURES.values() for test in tests]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *wanted]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
