# SPDX-License-Identifier: Apache-2.0
"""The audit of dependencies ends with 0 only if every version was looked up and none has a known vulnerability."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.machines import ROOT

GOOD = {"name": "a", "version": "1", "vulns": []}
HIT = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ([GOOD], 0, "no vulnerability is known of these 1 versions"),
        ([GOOD, HIT], 1, "b 2: PYSEC-1; versions with a fix: 3"),
        ([GOOD, UNKNOWN], 2, "error: 1 of 2 could not be looked up: c"),
        ([HIT, UNKNOWN], 1, "error: 1 of 2 could not be looked up: c"),
        ([], 2, ""),
        (None, 2, "error: nothing could be looked up: no route to the service"),
    ],
    ids=["clean", "vulnerable", "unknown", "both", "empty", "unreachable"],
)
def test_the_audit_ends_with_0_only_if_all_were_looked_up(
    tmp_path: Path, report: list[dict[str, Any]] | None, code: int, said: str
):
    # Stands in for pip-audit, which ends with 0 for what its service does not know.
    audit = tmp_path / "pip-audit"
    writes = "" if report is None else f"cat > \"${{!#}}\" <<'END'\n{json.dumps({'dependencies': report})}\nEND\n"
    audit.write_text(f"#!/usr/bin/env bash\necho no route to the service\n{writes}")
    audit.chmod(0o755)
    command = [str(ROOT / "scripts/audit_dependencies.sh")]
    environment = {**os.environ, "PIP_AUDIT": str(audit)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stdout + done.stderr


def test_without_pip_audit_the_error_says_what_to_install(tmp_path: Path):
    command = [str(ROOT / "scripts/audit_dependencies.sh")]
    environment = {**os.environ, "PIP_AUDIT": str(tmp_path / "none")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is not here; install pip-audit" in done.stderr
