# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/convergence` at toy size: real runs with and without noise, made once, and what is computed from them."""

import dataclasses
import json

import pytest

from benchmarks.convergence import __main__ as study_main
from benchmarks.convergence import code, results
from benchmarks.convergence.code import code_at_start, digest_of_code, loaded_sources, server_sources
from benchmarks.convergence.figures import draw_convergence
from benchmarks.convergence.runs import Measured, finished, keep, make_missing_of
from benchmarks.convergence.settings import METHODS, SYNCHRONOUS, WORKERS, Method, Noise, Run, Study
from tests.benchmarks.reports import read_cases

GUARDED = Method(
    name="guarded",
    title="guarded",
    options={
        "use_local_sgd": True,
        "local_sgd_workers": WORKERS,
        "local_sgd_sync_interval": 2,
        "local_sgd_warmup_steps": 2,
        "local_sgd_skip_anomaly": True,
    },
    goal=1.5,
)
NOISE = Noise(first=5, steps=3, interval=2, methods=(GUARDED,))
TOY = {
    "num_layers": 1,
    "hidden_size": 16,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "micro_batch_size": 1,
    "global_batch_size": WORKERS,
    "lr_warmup_iters": 0,
    "eval_iters": 1,
    "mock_data": True,
    "data_path": None,
}


def toy_study(output):
    return Study(
        output=output,
        iterations=12,
        evaluation=2,
        methods=(SYNCHRONOUS, GUARDED),
        noise=NOISE,
        overrides=TOY,
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose runs are finished."""
    made = toy_study(tmp_path_factory.mktemp("study"))
    study_main.make_missing(made, ["synchronous", "guarded"], [7], [7])
    return made


@pytest.mark.slow
def test_the_report_has_tables_cases_and_pictures(study, capsys):
    study_main.report_on(study, [7], [7], study.output / "report.json")
    cases = read_cases(study.output / "report.json")
    assert list(cases) == ["guarded_loss_ratio", "noise_guarded_meanwhile", "noise_guarded_after_an_interval"]
    assert (cases["guarded_loss_ratio"]["goal"], cases["noise_guarded_meanwhile"]["goal"]) == (1.5, None)
    runs = json.loads((study.output / "results.json").read_text())["runs"]
    assert set(runs) == {"synchronous-seed7", "guarded-seed7", "guarded-seed7-noise"}
    assert runs["guarded-seed7"]["validation"].keys() == {"2", "4", "6", "8", "10", "12"}
    assert runs["guarded-seed7"]["parameters"] > 1000
    for picture in ("convergence.png", "noise-seed7.png"):
        assert (study.output / picture).read_bytes().startswith(b"\x89PNG")
    assert "worker 3 was fed random tokens in iterations 6 to 8" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_run_is_not_made_again_unless_its_settings_changed(study, capsys):
    before = {file: file.stat().st_mtime_ns for file in (study.output / "runs").iterdir()}
    study_main.make_missing(study, ["synchronous", "guarded"], [7], [7])
    assert "3 runs of 12 iterations, 0 of them still to make" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in (study.output / "runs").iterdir()} == before
    other = dataclasses.replace(study, overrides={**TOY, "lr": 1e-2})
    assert finished(other, Run(method=GUARDED, seed=7)) is None
    # As Python's own sources do that are the corpus.
    study.corpus.parent.mkdir()
    study.corpus.with_suffix(".bin").write_bytes(b"changed")
    assert finished(study, Run(method=GUARDED, seed=7)) is None
    study.corpus.with_suffix(".bin").unlink()
    other = dataclasses.replace(study, noise=dataclasses.replace(NOISE, steps=4))
    assert finished(other, Run(method=GUARDED, seed=7)) is not None
    assert finished(other, Run(method=GUARDED, seed=7, noisy=True)) is None


@pytest.mark.slow
def test_noise_reaches_one_worker_while_it_lasts_and_the_others_with_the_next_round(study):
    clean, noisy = (finished(study, Run(method=GUARDED, seed=7, noisy=noisy)).training for noisy in (False, True))
    # Iterations 6 to 8 are noisy; the first round after their beginning is that of iteration 6.
    assert [losses[:5] for losses in noisy] == [losses[:5] for losses in clean]
    for worker in range(WORKERS):
        assert (noisy[worker][5] == clean[worker][5]) == (worker != NOISE.worker)
        assert noisy[worker][6] != clean[worker][6]
    assert len(clean[0]) == 12


def kept(study, code, sources=("examples/pretrain_gpt.py",)):
    """Keep a finished run that depends on some files and has this digest of them."""
    run = Run(method=GUARDED, seed=7)
    found = {"arguments": study.arguments(run), "sources": list(sources), "code": code}
    keep(study, run, Measured(parameters=1, seconds=1.0, training=[], rounds=[], validation={2: 1.0}, **found))
    return run


def test_a_run_is_made_again_where_the_code_that_it_ran_has_changed(tmp_path, monkeypatch, capsys):
    study = toy_study(tmp_path)
    run = kept(study, digest_of_code(["examples/pretrain_gpt.py"]))
    assert finished(study, run) is not None
    of_elsewhere = {**code_at_start(), "megatron_ext/errors.py": "changed"}
    monkeypatch.setattr(code, "code_at_start", lambda: of_elsewhere)
    assert finished(study, run) is not None
    changed = {**of_elsewhere, "examples/pretrain_gpt.py": "changed"}
    monkeypatch.setattr(code, "code_at_start", lambda: changed)
    made = []
    make_missing_of(study, [run], lambda _, again: made.append(again) or measured({2: 1.0}))
    assert made == [run]
    assert "made again, because the code that they ran has changed since: guarded-seed7" in capsys.readouterr().out


def test_a_run_of_which_no_code_was_written_down_is_made_again(tmp_path):
    study = toy_study(tmp_path)
    assert finished(study, kept(study, "", sources=())) is None


def test_what_a_process_has_loaded_of_the_package_is_known():
    assert {"examples/pretrain_gpt.py", "megatron_ext/errors.py"} <= set(loaded_sources()) <= code_at_start().keys()
    assert "megatron_ext/sync_service/rounds/round.py" in server_sources()


def measured(validation, rounds=()):
    return Measured(arguments=[], parameters=1, seconds=1.0, training=[], validation=validation, rounds=list(rounds))


def test_methods_are_held_against_their_reference_seed_by_seed(tmp_path, capsys):
    other = Method(name="other", title="other", options={}, reference="guarded", goal=1.01)
    made = dataclasses.replace(toy_study(tmp_path), methods=(SYNCHRONOUS, GUARDED, other))
    finals = {
        (SYNCHRONOUS, 1): 2.0,
        (SYNCHRONOUS, 2): 1.0,
        (GUARDED, 1): 2.2,
        (GUARDED, 2): 1.3,
        (GUARDED, 3): 9.0,  # its partner is missing
        (other, 1): 2.2,
    }
    found = {Run(method=method, seed=seed): measured({4: 5.0, 8: loss}) for (method, seed), loss in finals.items()}
    cases = {case.case: case for case in results.compare(made, found, [1, 2, 3])}
    assert cases["guarded_loss_ratio"].value == pytest.approx(1.2)
    assert cases["other_loss_ratio"].value == pytest.approx(1.0)
    assert [case.met for case in cases.values()] == ["yes", "yes"]
    assert "+20.00 %" in capsys.readouterr().out


@pytest.mark.parametrize("goal", [None, 1.02])
def test_a_picture_speaks_of_the_line_of_a_goal_only_where_it_has_one(tmp_path, goal):
    other = Method(name="other", title="other", options={}, goal=goal)
    made = dataclasses.replace(toy_study(tmp_path), methods=(SYNCHRONOUS, other))
    found = {Run(method=method, seed=1): measured({4: 5.0, 8: 2.0}) for method in made.methods}
    draw_convergence(made, found, [1], tmp_path / "losses.svg")
    picture = (tmp_path / "losses.svg").read_text()  # comments have the texts
    assert "% above the reference" in picture and ("(line: goal)" in picture) == (goal is not None)


def test_a_spike_is_the_largest_rise_meanwhile_against_the_run_without_noise(tmp_path):
    noisy = measured({4: 9.0, 6: 2.5, 8: 3.0, 10: 7.0})
    clean = measured({4: 1.0, 6: 2.0, 8: 2.0, 10: 1.0})
    assert results.spike(toy_study(tmp_path), noisy, clean) == pytest.approx(1.5)


def test_exclusions_are_counted_for_the_noisy_worker_in_and_out_of_the_noise_and_for_the_others(tmp_path):
    rounds = [
        {"iteration": 4, "rejected": {"a": [3], "b": [0, 1]}},
        {"iteration": 6, "rejected": {"a": [3], "b": [3, 2]}},
        {"iteration": 8, "rejected": {"a": [3]}},
        {"iteration": 10, "rejected": {}},
    ]
    assert results.exclusions(toy_study(tmp_path), measured({}, rounds)) == (3, 1, 3)


def test_the_defaults_are_as_long_and_as_noisy_as_the_page_says():
    made = Study(output=study_main.REPOSITORY)
    assert made.iterations >= 500
    for method in METHODS[1:]:
        arguments = made.arguments(Run(method=method, seed=1))
        warmup = int(arguments[arguments.index("--local-sgd-warmup-steps") + 1])
        assert warmup == made.iterations / 4
        assert (made.iterations - warmup) % method.options["local_sgd_sync_interval"] == 0
    noise, guarded = made.noise, made.noise.methods[-1]
    detecting = warmup + noise.interval * guarded.options["local_sgd_ewma_warmup_steps"]
    assert guarded.options["local_sgd_ewma_warmup_steps"] <= 10
    assert (noise.steps, detecting < noise.first, noise.end % noise.interval) == (50, True, 0)
    assert noise.recovered % made.evaluation == 0
    assert any(noise.first < at <= noise.end for at in range(0, made.iterations, made.evaluation))


@pytest.mark.parametrize("number", ["0", "640", "-256", "many"])
def test_a_length_at_which_intervals_do_not_end_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        study_main.main(["--iterations", number])
    assert f"argument --iterations: {number!r}: give a multiple of 256" in capsys.readouterr().err
    assert study_main.parser().parse_args(["--iterations", "2048"]).iterations == 2048


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--iterations", "256"], "workers have to recover from the noise until iteration 368, after the end"),
        (["--iterations", "1024"], "noise after 302 iterations, but detectors have settled after 416 only"),
        (["--evaluation-interval", "368"], "no evaluation while there is noise, in iterations 303 to 352"),
    ],
)
def test_noise_of_which_nothing_could_be_said_is_refused_before_any_run(options, problem, capsys, tmp_path):
    with pytest.raises(SystemExit):
        study_main.main([*options, "--output", str(tmp_path / "study")])
    said = capsys.readouterr().err
    assert problem in said and "make no runs with noise (--noise-seeds without a number)" in said
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("number", ["0", "15", "-16", "often"])
def test_evaluations_that_miss_the_end_of_the_first_clean_interval_are_refused(number, capsys):
    with pytest.raises(SystemExit):
        study_main.main(["--evaluation-interval", number])
    assert f"argument --evaluation-interval: {number!r}: give a divisor of 368" in capsys.readouterr().err
    assert study_main.parser().parse_args(["--evaluation-interval", "16"]).evaluation_interval == 16
