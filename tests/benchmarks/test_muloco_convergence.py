# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/muloco_convergence` at toy size: real runs of both optimizers, and what is made of the results."""

import json

import pytest

from benchmarks import muloco_convergence as muloco
from benchmarks.convergence.code import digest_of_code
from benchmarks.convergence.runs import Measured, keep
from benchmarks.convergence.settings import WORKERS, Run
from tests.benchmarks.reports import read_cases

TOY = {
    **muloco.sizes(layers=1, hidden=16, context=16, sequences=1),
    "lr_warmup_iters": 0,
    "eval_iters": 1,
    "mock_data": True,
    "data_path": None,
}


def toy_study(output, intervals=(2,), rates=(1e-3,)):
    methods = muloco.methods_of(intervals, {"diloco": rates, "muloco": rates})
    return muloco.MulocoStudy(output=output, iterations=8, evaluation=4, methods=methods, overrides=TOY)


@pytest.mark.slow
def test_both_optimizers_train_and_the_report_has_tables_cases_and_a_picture(tmp_path, capsys):
    study = toy_study(tmp_path)
    muloco.make_missing(study, [7])
    muloco.report_on(study, [7], tmp_path / "report.json")
    assert list(read_cases(tmp_path / "report.json")) == ["muloco_h2_loss_ratio"]
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert set(runs) == {"diloco_h2_lr0.001-seed7", "muloco_h2_lr0.001-seed7"}
    adam, muon = (runs[name]["validation"] for name in sorted(runs))
    assert adam.keys() == muon.keys() == {"4", "8"} and adam != muon
    rounds = json.loads((tmp_path / "runs" / "muloco_h2_lr0.001-seed7.json").read_text())["rounds"]
    assert [entry["iteration"] for entry in rounds] == [4, 6, 8]
    table = (tmp_path / "table.md").read_text()
    assert "| MuLoCo, Muon, H = 2, lr 0.001 | 1 |" in table and "| H = 2, seed 7, lr | 0.001 |" in table
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    muloco.make_missing(study, [7])
    assert "2 runs of 8 iterations, 0 of them still to make" in capsys.readouterr().out


def finished(study, method, seed, loss):
    found = {"arguments": study.arguments(Run(method=method, seed=seed)), "validation": {4: 9.0, 8: loss}}
    measured = Measured(parameters=1, seconds=1.0, training=[], rounds=[], code=digest_of_code(()), **found)
    keep(study, Run(method=method, seed=seed), measured)


def test_each_method_takes_its_best_rate_and_is_held_against_the_same_interval_seed_by_seed(tmp_path):
    study = toy_study(tmp_path, intervals=(2, 4), rates=(1e-3, 2e-3))
    losses = {"diloco_h2_lr0.001": 2.0, "diloco_h2_lr0.002": 3.0, "muloco_h2_lr0.001": 2.5, "muloco_h2_lr0.002": 1.0}
    by_name = {method.name: method for method in study.methods}
    for name, loss in losses.items():
        finished(study, by_name[name], 1, loss)
    assert [method.name for method in muloco.best(study, 1)] == [
        "diloco_h2_lr0.001",
        "muloco_h2_lr0.002",
        "diloco_h4_lr0.001",
        "muloco_h4_lr0.002",
    ]
    finished(study, by_name["diloco_h4_lr0.001"], 1, 4.0)
    finished(study, by_name["muloco_h4_lr0.002"], 1, 5.0)
    finished(study, by_name["diloco_h2_lr0.001"], 2, 4.0)
    finished(study, by_name["muloco_h2_lr0.002"], 2, 3.0)
    finished(study, by_name["muloco_h2_lr0.002"], 3, 9.0)  # its partner is missing
    cases = {case.case: case.value for case in muloco.report_on(study, [1, 2, 3], None)}
    assert cases == {"muloco_h2_loss_ratio": pytest.approx(0.625), "muloco_h4_loss_ratio": pytest.approx(1.25)}
    table = (tmp_path / "table.md").read_text()
    assert "| MuLoCo, Muon, H = 2, lr 0.002 | 3 | 3.0000 | 1.0000 - 9.0000 | -37.50 % | -50.00 - -25.00 % |" in table
    assert "| MuLoCo, Muon | 2.5000 | 1.0000 |" in table


def test_all_methods_see_the_same_tokens_and_differ_in_the_inner_optimizer_alone():
    study = muloco.MulocoStudy(output=muloco.REPOSITORY, overrides=muloco.sizes())
    seen = set()
    for method in study.methods:
        words = study.arguments(Run(method=method, seed=1))
        assert "--data-path" in words and "--mock-data" not in words
        assert (study.iterations - study.warmup) % method.interval == 0
        settings = ("--train-iters", "--global-batch-size", "--local-sgd-workers", "--outer-optimizer-lr")
        seen.add(tuple(words[words.index(flag) + 1] for flag in settings))
    assert seen == {(str(study.iterations), str(8 * WORKERS), str(WORKERS), "0.7")}


def test_a_length_at_which_intervals_do_not_end_is_refused(capsys):
    with pytest.raises(SystemExit):
        muloco.main(["--iterations", "100"])
    assert "--iterations 100: give a multiple of 256, so that intervals end" in capsys.readouterr().err
