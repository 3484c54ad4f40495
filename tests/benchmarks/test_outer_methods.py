# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/outer_methods` at toy size: its command lines are good, and what is made of the results."""

import pytest

from benchmarks import outer_methods
from benchmarks.convergence.code import digest_of_code
from benchmarks.convergence.runs import Measured, keep
from benchmarks.convergence.settings import Run, Study
from benchmarks.muloco_convergence import sizes
from megatron_ext.outer.config import OuterOptimizerConfig
from tests.benchmarks.reports import read_cases


def study_of(output, name, **overrides):
    question = outer_methods.STUDIES[name]
    return Study(output=output, methods=question.methods, processes=question.processes, overrides=overrides)


def finished(study, method, seed, loss):
    run = Run(method=method, seed=seed)
    measured = {"arguments": study.arguments(run), "validation": {4: 9.0, 8: loss}}
    keep(study, run, Measured(parameters=1, seconds=1.0, training=[], rounds=[], code=digest_of_code(()), **measured))


@pytest.mark.parametrize("name", list(outer_methods.STUDIES))
def test_every_method_is_held_against_the_first_seed_by_seed(tmp_path, name):
    study = study_of(tmp_path, name)
    for place, method in enumerate(study.methods):
        for seed in (1, 2):
            finished(study, method, seed, float(seed * (place + 1)))
    outer_methods.report_on(study, [1, 2], tmp_path / "report.json")
    cases = read_cases(tmp_path / "report.json")
    names = [f"{method.name}_loss_ratio" for method in study.methods[1:]]
    assert {case: cases[case]["value"] for case in names} == {case: place for place, case in enumerate(names, start=2)}
    table = (tmp_path / "table.md").read_text()
    assert f"against {study.methods[0].title}" in table and "+100.00 %" in table
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_the_schedules_of_the_study_go_with_its_length():
    for method in outer_methods.STUDIES["schedules"].methods:
        fields = {name: value for name, value in method.options.items() if name.startswith("outer_optimizer")}
        config = OuterOptimizerConfig(**fields)
        assert [*config.problems(), *config.length_problems(outer_methods.ROUNDS)] == []


@pytest.mark.slow
def test_the_methods_train(tmp_path):
    from benchmarks.convergence.runs import make, make_missing_of

    toy = {
        **sizes(layers=1, hidden=16, context=16, sequences=1),
        **{"lr_warmup_iters": 0, "eval_iters": 1, "mock_data": True, "data_path": None},
    }
    question = outer_methods.STUDIES["schedules"]
    batch = {"global_batch_size": question.processes}
    study = Study(
        output=tmp_path,
        iterations=outer_methods.ITERATIONS,
        evaluation=outer_methods.ITERATIONS,
        methods=question.methods[:2],
        processes=question.processes,
        overrides={**toy, **batch},
    )
    make_missing_of(study, [Run(method=method, seed=1) for method in study.methods], make)
    outer_methods.report_on(study, [1], None)
    assert "| 1 |" in (tmp_path / "table.md").read_text()
