# SPDX-License-Identifier: Apache-2.0
"""What was seen of a release of Megatron, kept in a file, and the page that is made of it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.versions.features import FEATURES

__all__ = ["PAGE", "RECORDS", "ReleaseRecord", "page", "read_records", "write_records"]

_ROOT = Path(__file__).resolve().parents[2]
RECORDS = _ROOT / "tests" / "versions" / "records.json"
PAGE = _ROOT / "docs" / "versions.md"


@dataclass(frozen=True, kw_only=True)
class ReleaseRecord:
    """One run of `python -m tests.versions`."""

    release: str
    """Megatron's version, as the package says it."""
    commit: str
    """Of the checkout; empty for a package of the index."""
    date: str
    """Of the run, YYYY-MM-DD."""
    patches: int
    """How many were looked at."""
    misfits: list[str]
    """Names of patches that would not apply although their target is to be there."""
    unavailable: dict[str, str]
    """Why the release has no target for them, by name of patch."""
    tests: dict[str, str]
    """'passed', 'failed' or 'skipped' by node id; a test without an entry did not run."""


def read_records(path: Path = RECORDS) -> list[ReleaseRecord]:
    """Return the records of the file, newest release first."""
    return [ReleaseRecord(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def write_records(records: Sequence[ReleaseRecord], path: Path = RECORDS) -> None:
    """Write the records, newest release first."""
    ordered = sorted(records, key=lambda record: [int(part) for part in record.release.split(".")], reverse=True)
    path.write_text(json.dumps([asdict(record) for record in ordered], indent=1) + "\n", encoding="utf-8")


def page(records: Sequence[ReleaseRecord]) -> str:
    """Return docs/versions.md."""
    return "\n".join(_lines(records)) + "\n"


def _lines(records: Sequence[ReleaseRecord]) -> Iterator[str]:
    yield from (
        "# Releases of Megatron",
        "",
        "What ran on which release, of the short set of tests in [features.py](../tests/versions/features.py). What",
        "is not in this table was not tested. `python -m tests.versions --megatron=CHECKOUT` tries a release and",
        "writes this page; without the option it tries the installed package.",
        "",
        "| release | commit | date | patches that fit | " + " | ".join(FEATURES) + " |",
        "|" + "---|" * (4 + len(FEATURES)),
    )
    for record in records:
        fit = f"{record.patches - len(record.misfits) - len(record.unavailable)} of {record.patches}"
        cells = [_cell(record, tests) for tests in FEATURES.values()]
        commit = record.commit[:8] or "package of the index"
        yield f"| {record.release} | {commit} | {record.date} | {fit} | " + " | ".join(cells) + " |"
    for record in records:
        found = _exceptions(record)
        if found:
            yield from ("", f"## {record.release}", "", *found)


def _cell(record: ReleaseRecord, tests: Sequence[str]) -> str:
    """Say how the tests of a feature ended; a name without a bracket stands for all its parameters."""
    ends = [end for name, end in record.tests.items() if any(_is_of(name, test) for test in tests)]
    if not ends:
        return "not tested"
    return ", ".join(f"{ends.count(end)} {end}" for end in ("passed", "failed", "skipped") if end in ends)


def _is_of(name: str, test: str) -> bool:
    return name == test or name.startswith(f"{test}[")


def _exceptions(record: ReleaseRecord) -> list[str]:
    """Return a line for each patch that is unavailable or does not fit, and each test that failed."""
    return [
        *(f"- unavailable: `{name}`: {problem}" for name, problem in record.unavailable.items()),
        *(f"- does not fit: `{name}`" for name in record.misfits),
        *(f"- failed: `{name}`" for name, end in record.tests.items() if end == "failed"),
    ]
