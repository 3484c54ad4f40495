# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/hot_switch_estimate.py` on one case: it runs, reports what it promises, and says that it is computed."""

import pytest

from benchmarks import hot_switch_estimate
from megatron_ext.simulate.hot_switching.document_lengths import log_normal_lengths
from tests.benchmarks.reports import read_cases

FEW = ["--cases", "github_7b_8gpus", "--machines", "A800", "--spreads", "1.2", "--sequences", "64", "--steps", "2"]
FEW += ["--attention", "fused-rows", "documents"]


def test_a_case_has_a_column_for_every_baseline_and_both_kinds_of_attention(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert hot_switch_estimate.main([*FEW, "--json", str(path)]) == 0
    cases = read_cases(path)
    assert set(cases) == {
        f"a800_github_7b_8gpus_{attention}_spread_1.2_over_{baseline}"
        for attention in ("fused-rows", "documents")
        for baseline in ("home", "static", "static_recomputing")
    }
    gains = {key.removeprefix("a800_github_7b_8gpus_"): case["value"] for key, case in cases.items()}
    # Long rows of short documents cost single strategies more when attention looks at whole rows.
    assert 0.3 < gains["documents_spread_1.2_over_home"] < gains["fused-rows_spread_1.2_over_home"] < 3
    # Home is one of the single strategies, and what may be computed again is a choice more.
    for attention in ("fused-rows", "documents"):
        home, static, recomputing = (
            gains[f"{attention}_spread_1.2_over_{baseline}"] for baseline in ("home", "static", "static_recomputing")
        )
        assert home >= static >= recomputing
    assert all(case["unit"] == "computed speed-up" and case["goal"] is None for case in cases.values())
    text = capsys.readouterr().out
    assert text.startswith("COMPUTED") and "not measured" in text and "up to 2.99" in text


def test_a_list_that_does_not_fit_is_not_counted(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert hot_switch_estimate.main([*FEW, "--memory-gib", "40", "--json", str(path)]) == 0
    assert read_cases(path) == {}
    assert "and --memory-gib is 40; use more GPUs, a shorter context" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--cases", "github_7b_8gpus"), ("--machines", "A800"), ("--spreads", "1.2")]
)
def test_a_case_is_computed_once(option: str, value: str, capsys):
    with pytest.raises(SystemExit):
        hot_switch_estimate.main([*FEW, option, value, value])
    assert f"argument {option}: {value} is given more than once; give each once" in capsys.readouterr().err


def test_the_cases_are_the_papers_with_the_lists_of_its_readme():
    cases = {case.name: case for case in hot_switch_estimate.paper_cases()}
    assert len(cases) == 10
    assert cases["commoncrawl_7b_8gpus"].strategies == ("1,4,2", "8,1,1", "2,2,2")
    assert cases["github_32b_32gpus"].strategies == ("1,16,2", "4,2,4", "4,4,2", "2,8,2")
    assert cases["github_32b_32gpus"].bounds == (32768, 16384, 8192, 4096, 0)


@pytest.mark.parametrize("spread", [0.5, 1.2, 1.6, 2.0])
def test_assumed_lengths_have_the_published_mean(spread):
    mean = hot_switch_estimate.MEAN_TOKENS["commoncrawl"]
    assert log_normal_lengths(mean, spread).mean() == pytest.approx(mean, rel=0.003)
