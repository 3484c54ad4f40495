# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/hot_switch_estimate.py` on one case: it runs, reports what it promises, and says that it is computed."""

import pytest

from benchmarks import hot_switch_estimate
from tests.benchmarks.reports import read_cases


def test_a_case_is_estimated_for_both_kinds_of_attention(tmp_path, capsys):
    path = tmp_path / "report.json"
    few = ["--cases", "github_7b_8gpus", "--machines", "A800", "--spreads", "1.2", "--sequences", "64"]
    assert hot_switch_estimate.main([*few, "--json", str(path)]) == 0
    cases = read_cases(path)
    assert set(cases) == {f"a800_github_7b_8gpus_{attention}_spread_1.2" for attention in ("rows", "documents")}
    rows, documents = (case["value"] for case in cases.values())
    # Long rows of short documents cost static strategies more when attention looks at whole rows.
    assert 0.3 < documents < rows < 3
    assert all(case["unit"] == "computed speed-up" and case["goal"] is None for case in cases.values())
    text = capsys.readouterr().out
    assert text.startswith("COMPUTED") and "not measured" in text and "up to 2.99" in text


def test_the_cases_are_the_papers_with_the_lists_of_its_readme():
    cases = {case.name: case for case in hot_switch_estimate.paper_cases()}
    assert len(cases) == 10
    assert cases["commoncrawl_7b_8gpus"].strategies == ("1,4,2", "8,1,1", "2,2,2")
    assert cases["github_32b_32gpus"].strategies == ("1,16,2", "4,2,4", "4,4,2", "2,8,2")
    assert cases["github_32b_32gpus"].bounds == (32768, 16384, 8192, 4096, 0)


@pytest.mark.parametrize("spread", [0.5, 1.2])
def test_batches_have_the_published_mean(spread):
    lengths = hot_switch_estimate.batch_of("commoncrawl", spread, 2000)
    assert sum(lengths) / len(lengths) == pytest.approx(hot_switch_estimate.MEAN_TOKENS["commoncrawl"], rel=0.02)
