# SPDX-License-Identifier: Apache-2.0
"""Reading what a benchmark wrote with `--json`, and the form that it must have."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

__all__ = ["read_cases"]

TEXT, NUMBER = str, (int, float)


def read_cases(path: Path) -> dict[str, dict[str, Any]]:
    """Return the cases of a report by name, after checking everything else about its form."""
    content = json.loads(path.read_text())
    assert set(content) == {"machine", "versions", "cases"}
    assert {"cpu", "cores", "memory_gib"} <= set(content["machine"])
    assert content["machine"]["cpu"]
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["memory_gib"] > 0
    assert {"megatron-ext", "megatron-core", "torch", "python"} <= set(content["versions"])
    assert all(isinstance(version, str) and version for version in content["versions"].values())
    # Which code it was: a checkout's commit.
    assert re.fullmatch(r"\S+( \([0-9a-f]{7,}( with changes)?\))?", content["versions"]["megatron-ext"])
    for case in content["cases"]:
        assert set(case) == {"case", "value", "unit", "goal", "direction"}
        assert isinstance(case["case"], TEXT)
        assert isinstance(case["unit"], TEXT)
        assert isinstance(case["value"], NUMBER)
        assert math.isfinite(case["value"])
        assert case["goal"] is None or isinstance(case["goal"], NUMBER)
        assert case["direction"] in ("lower", "higher")
    cases = {case["case"]: case for case in content["cases"]}
    assert len(cases) == len(content["cases"]), "a case occurs twice"
    return cases
