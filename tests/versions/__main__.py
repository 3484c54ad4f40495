# SPDX-License-Identifier: Apache-2.0
"""Try a release of Megatron with a short set of tests, and write down what ran.

`python -m tests.versions` tries the installed package, `--megatron=CHECKOUT` a checkout.
"""

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import megatron_checkout
from tests.versions.features import FEATURES, NAMES
from tests.versions.record import PAGE, ReleaseRecord, page, read_records, write_records

VERSION = "from megatron_ext.patching.gates import installed_version as v; print(v('megatron-core'))"

LACKING = """
import json, sys
from megatron_ext.features import all_features
lacks = lambda feature: any(p.name in sys.argv and not p.dispensable for p in feature.required_patches())
print(json.dumps([feature.name for feature in all_features() if lacks(feature)]))
"""
"""Prints which features need a patch, of those it is given the names of."""


def main() -> int:
    """Run the tests; return 1 when a patch does not fit or a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--megatron", type=Path, metavar="CHECKOUT", help="a Megatron-LM checkout")
    parser.add_argument("--commit", help="of the checkout, where git does not say it")
    parser.add_argument("--feature", choices=tuple(FEATURES), action="append", help="try these alone")
    parser.add_argument("--dry-run", action="store_true", help="write nothing down")
    options = parser.parse_args()
    use = megatron_checkout.use(options.megatron) if options.megatron else contextlib.nullcontext()
    try:
        with use:
            record = _try(options.megatron, _commit(options), options.feature or list(FEATURES))
    except pytest.UsageError as error:
        sys.exit(str(error))
    if not options.dry_run:
        _write(record, keep_tests=options.feature is not None)
    print(page([record]))
    return int(bool(record.misfits) or "failed" in record.tests.values())


def _try(checkout: Path | None, commit: str, features: list[str]) -> ReleaseRecord:
    release = _output([sys.executable, "-c", VERSION])
    listed = json.loads(_output([sys.executable, "-m", "megatron_ext.cli.main", "patches", "--json"]))
    unavailable = {entry["name"]: entry["problem"] for entry in listed if entry["status"] == "unavailable"}
    lacking = json.loads(_output([sys.executable, "-c", LACKING, *unavailable]))
    tests: dict[str, str] = {}
    for feature in features:
        if NAMES.get(feature) in lacking:
            print(f"{feature}: not available on {release}, so that its tests are not run")
        else:
            tests |= _run(FEATURES[feature], checkout)
    return ReleaseRecord(
        release=release,
        commit=commit,
        date=datetime.date.today().isoformat(),
        patches=len(listed),
        misfits=[entry["name"] for entry in listed if entry["status"] == "broken"],
        unavailable=unavailable,
        tests=tests,
    )


def _run(tests: tuple[str, ...], checkout: Path | None) -> dict[str, str]:
    """Return how each test ended, by node id."""
    against = [f"--megatron={checkout.resolve()}"] if checkout else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        done = subprocess.run([*command, *against, *tests], check=False)
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(f"pytest ended with {done.returncode}: not all of these tests were run: {' '.join(tests)}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {f"{case.get('file')}::{case.get('name')}": _end(case) for case in cases}


def _end(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def _write(record: ReleaseRecord, *, keep_tests: bool) -> None:
    """Put the record in the place of the former one of its release; with `keep_tests` tests add to those."""
    others = read_records()
    former = [each for each in others if each.release == record.release and each.commit == record.commit]
    if keep_tests and former:
        record.tests.update({**former[0].tests, **record.tests})
    write_records([record, *(each for each in others if each.release != record.release)])
    PAGE.write_text(page(read_records()), encoding="utf-8")


def _commit(options: argparse.Namespace) -> str:
    """Return the commit of the checkout; empty for an installed package."""
    if options.megatron is None or options.commit or list(options.megatron.glob("megatron_core-*.dist-info")):
        return options.commit or ""
    asked = ["git", "-C", str(options.megatron), "rev-parse", "--show-prefix", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    *prefix, commit = done.stdout.splitlines() or [""]
    if done.returncode or any(prefix):
        sys.exit(f"--megatron {options.megatron}: git does not say its commit; give it with --commit")
    return commit


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
