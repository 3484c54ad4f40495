# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext simulate` as people call it."""

import csv
import json
from pathlib import Path

import pytest

from megatron_ext.cli.main import main

JOB = ["simulate", "local-sgd", "--workers", "4", "--bandwidth", "10", "--step-seconds", "5"]
LLAMA = [*JOB, "--model", "llama-7b", "--local-sgd-sync-interval", "100", "--local-sgd-codec", "bf16"]


def test_a_run_is_shown_beside_synchronous_training(capsys: pytest.CaptureFixture[str]):
    assert main([*LLAMA, "--step-tokens", "1000000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 workers with 1 GPU each, 6.73 billion parameters, 10000 steps of 5 s\n")
    rows = {line[:20].strip(): line.split()[-1] for line in out.splitlines()[2:]}
    # As `local-sgd suggest` has it.
    assert rows["utilisation"] == "0.969"
    assert rows["outer rounds"] == "100"
    assert float(rows["training"]) + float(rows["sending"]) == pytest.approx(100)
    assert main([*LLAMA, "--step-tokens", "1000000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["synchronous"]["utilisation"] == pytest.approx(0.236, abs=1e-3)
    one = found["local SGD"]
    assert one["tokens_per_second"] == pytest.approx(one["worker_steps"] * 1e6 / one["seconds"])


def test_a_step_follows_from_what_gpus_reach(capsys: pytest.CaptureFixture[str]):
    words = ["simulate", "local-sgd", "--workers", "2", "--bandwidth", "10", "--parameters", "1e9"]
    words += ["--worker-gpus", "10"]
    assert main([*words, "--tflops", "300", "--step-tokens", "1000000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["synchronous"]
    assert found["seconds_by_cause"]["training"] == pytest.approx(10_000 * 6e15 / 3e15)


def test_ten_thousand_gpus_that_fail_and_vary_are_simulated(capsys: pytest.CaptureFixture[str]):
    words = ["--workers", "1250", "--worker-gpus", "8", "--latency", "0", "--steps", "100000", "--jitter", "0.05"]
    words += ["--mtbf-hours", "50000", "--save-interval", "500", "--save-seconds", "30", "--local-sgd-fragments", "4"]
    words += ["--local-sgd-fragment-sync-delay", "4"]
    assert main([*LLAMA, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["local SGD"]
    assert found["worker_steps"] == 125_000_000
    assert found["failures"] > 5
    assert sum(found["seconds_by_cause"].values()) == pytest.approx(found["seconds"])


def test_a_sweep_is_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table, picture = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    words = ["--sweep", "bandwidth=1:100:3", "--sweep", "local-sgd-codec=bf16,int4"]
    assert main([*LLAMA, *words, "--csv", str(table), "--png", str(picture)]) == 0
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Synchronous training has no codec, and is there once.
    assert [(row["bandwidth"], row["local-sgd-codec"]) for row in rows] == [
        (bandwidth, codec) for bandwidth in ("1", "10", "100") for codec in ("", "bf16", "int4")
    ]
    of_ours = [float(row["utilisation"]) for row in rows if row["method"] == "local SGD"]
    assert of_ours[0] < of_ours[1] < of_ours[3] and of_ours[0] < of_ours[2] < of_ours[4]
    assert of_ours[2] == pytest.approx(0.969, abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("local SGD") == 6


def test_a_way_to_train_that_lacks_an_option_is_one_line_along_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drawn = tmp_path / "sweep.svg"
    assert main([*LLAMA, "--sweep", "local-sgd-sync-interval=10,100", "--json", "--png", str(drawn)]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = [(row["method"], row["local-sgd-sync-interval"]) for row in rows]
    assert found == [("synchronous", None), ("local SGD", 10), ("local SGD", 100)]
    # What changes nothing at all is told for every value.
    assert main([*LLAMA, "--sweep", "seed=1,2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


def test_the_axis_of_a_sweep_names_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []
    monkeypatch.setattr("megatron_ext.simulate.sweep.draw_sweep", lambda *inputs: drawn.append(inputs[-1]))
    assert main([*LLAMA, "--sweep", "bandwidth=1,2", "--png", str(tmp_path / "a.png")]) == 0
    assert drawn == ["Gbit/s from one worker to the others, all of its links together"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["local-sgd"], "--workers, --bandwidth, --model or --num-layers or --parameters, --step-seconds or --tflops"),
        (["local-sgd", "--workers", "2", "--sweep", "bandwidth=1,2", "--parameters", "1e9", "--tflops", "1"], None),
        (["local-sgd", "--model", "llama-7b", "--sweep", "bandwidth=1,2"], "--workers, --step-seconds or --tflops"),
        (["sync-service", "--peers", "2", "--parameters", "1e9", "--tflops", "1", "--bandwidth", "1"], "--server-band"),
        (["hot-switch", "--model", "llama-7b"], "--hot-switch-strategies or --hot-switch-strategy-file, --lengths or"),
    ],
)
def test_all_that_is_missing_is_named_in_one_line(
    words: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert (f"simulate: these options are missing: {said}" in error) if said else "options are missing" not in error
    assert error.count("\n") == 1


def test_one_option_that_is_missing_is_named_with_what_may_stand_in_its_place(capsys: pytest.CaptureFixture[str]):
    without_a_time = ["local-sgd", "--workers", "4", "--bandwidth", "10", "--model", "llama-7b"]
    assert main(["simulate", *without_a_time]) == 2
    said = "megatron-ext: error: simulate: --step-seconds or --tflops is missing; give it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-layers", "-4"], "model: --num-layers must be at least 1, got -4"),
        (["--num-experts", "0"], "model: --num-experts must be at least 1, got 0"),
        (["--kv-channels", "0"], "model: --kv-channels must be at least 1, got 0"),
        (["--num-query-groups", "5"], "--num-attention-heads 32 cannot be divided over --num-query-groups 5; change"),
        (["--hidden-size", "65"], "--hidden-size is 65, which is not a multiple of --num-attention-heads 32; change"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_the_words_of_the_options(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*LLAMA, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


SERVICE = ["simulate", "sync-service", "--peers", "4", "--bandwidth", "1", "--server-bandwidth", "10", "--reduction"]
SERVICE += ["500", "--step-seconds", "1", "--parameters", "1e9", "--steps", "1000", "--sync-service-interval", "100"]


def test_a_run_at_a_sync_service_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main([*SERVICE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sync service"]
    # 32 s each for uploads, the reduction and downloads.
    assert found["seconds"] == pytest.approx(10 * 196 - 32, abs=1)
    assert main([*SERVICE, "--sweep", "sync-service-interval=50,100", "--sweep", "quorum=3,4"]) == 0
    assert capsys.readouterr().out.count("sync service") == 4
    assert main([*SERVICE, "--sweep", "rounds=synchronous,asynchronous", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["rounds"], row["rounds_of_run"]) for row in rows] == [("synchronous", 10), ("asynchronous", 40)]
    assert main([*SERVICE, "--peers", "1", "--sync-service-interval", "1", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 peer with 1 GPU each, 1.00 billion parameters, 1 step of 1 s\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "0"], "--peers is 0; give a number of at least 1"),
        (["--server-bandwidth", "-1"], "--server-bandwidth is -1; give a number from 1e-06 to 1e+09"),
        (["--reduction", "0"], "--reduction is 0; give a number from 1e-06 to 1e+09"),
        (["--quorum", "5"], "simulate: --quorum is 5; it must be 1 to peers (4)"),
        (["--peers", "5000"], "simulate: --peers is 5000; it must be 1 to 4096"),
        (["--rounds", "sometimes"], "--rounds is sometimes; it must be synchronous or asynchronous"),
        (["--rounds", "asynchronous", "--quorum", "3"], "--quorum has no meaning with asynchronous rounds"),
        (["--max-staleness", "3"], "--max-staleness is of asynchronous rounds, and --rounds is synchronous; change"),
        (["--rounds", "asynchronous", "--max-staleness", "-5"], "--max-staleness is -5; it must be 0 or more"),
        (["--grace-seconds", "10"], "--grace-seconds has no effect with a quorum of all peers; give a smaller"),
        (["--shards", "0"], "--shards is 0; give a number of at least 1"),
        (["--shards", "9"], "--shards is 9: the model has 1 unit (layers, or tensors without one), each of which"),
        (["--grace-seconds", "10", "--quorum", "4"], "--grace-seconds has no effect with a quorum of all peers"),
        (["--rounds", "asynchronous", "--grace-seconds", "10"], "--grace-seconds has no meaning with asynchronous"),
        (["--restart-seconds", "10"], "--restart-seconds has no effect without --mtbf-hours; give it or drop this"),
        (["--swiglu", "--num-experts", "8"], "beside the model's shape; drop it, or --num-experts, --swiglu"),
        (["--sync-service-interval", "2000"], "is longer than the run's 1000 steps"),
        (["--sync-service-delay", "100"], "the delay must be below the interval"),
        (["--sync-service-interval-seconds", "60"], "counts steps and --sync-service-interval-seconds time"),
        (["--slow-factor", "2"], "--slow-peers and --slow-factor need each other"),
        (["--round-work", "1"], "--round-work is of workers inside a job"),
        (["--sync-service-peers", "4"], "--sync-service-peers is --peers here; give that"),
        (["--sync-service", "host:1"], "--sync-service is where a run's server is, and a simulation has one of its"),
        (["--sync-service-streams", "4"], "--sync-service-streams decides how much of a link is reached; give what"),
        (["--sync-service-take-over"], "--sync-service-take-over decides over no time and no byte that are simulated"),
    ],
)
def test_bad_input_of_peers_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([*SERVICE, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "--workers is 0; give a number from 1 to 100000"),
        (["--bandwidth", "-1"], "--bandwidth is -1; give a number from 1e-06 to 1e+09"),
        (["--latency", "nan"], "--latency is nan"),
        (["--sites", "8", "--site-bandwidth", "1"], "--sites is 8; give a number from 1 to --workers 4"),
        (["--sites", "3", "--site-bandwidth", "1"], "--sites 3 does not divide --workers 4"),
        (["--sites", "2"], "--sites above 1 needs --site-bandwidth"),
        (
            ["--sites", "2", "--site-bandwidth", "1", "--site-latency", "0.05"],
            "--site-latency 0.05 is below --latency 0.1, which every message has; raise it or drop it",
        ),
        (["--restart-seconds", "10"], "--restart-seconds has no effect without --mtbf-hours; give it or drop this"),
        (["--save-interval", "10"], "--save-interval has no effect without --save-seconds or --mtbf-hours; give one"),
        (
            ["--save-interval", "10001", "--save-seconds", "1"],
            "--save-interval 10001 is longer than the run's 10000 steps, so that no checkpoint falls into it",
        ),
        (["--site-bandwidth", "2"], "simulate: --site-bandwidth has no effect with one site; give --sites or drop it"),
        (["--site-latency", "2"], "simulate: --site-latency has no effect with one site; give --sites or drop it"),
        (["--slow-workers", "2"], "--slow-workers and --slow-factor need each other"),
        (["--mtbf-hours", "1"], "--mtbf-hours needs --save-interval"),
        (["--tflops", "100"], "--step-seconds and --tflops are two ways to say one thing; drop one of them"),
        (["--step-seconds", "0"], "--step-seconds, or --tflops in its place, must be above 0"),
        (["--local-sgd-sync-interval", "20000"], "is longer than the run's 10000 local steps"),
        (["--local-sgd-fragment-sync-delay", "100"], "must be 0 or more, and below --local-sgd-sync-interval 100"),
        (["--local-sgd-fragments", "99"], "it must be at most the model's layers, 32"),
        (["--local-sgd-warmup-steps", "10000"], "leaves no local step"),
        (["--local-sgd-use-async"], "drop --local-sgd-sync-interval"),
        (["--local-sgd-skip-anomaly"], "--local-sgd-skip-anomaly decides over no time and no byte"),
        (["--outer-optimizer", "adam"], "--outer-optimizer decides over no time"),
        (["--local-sgd-sync-in-forward"], "--local-sgd-sync-in-forward lets rounds overlap with the forward pass"),
        (["--local-sgd-workers", "4"], "--local-sgd-workers is --workers here; give that"),
        (["--use-local-sgd"], "--use-local-sgd is what is simulated in any case; drop it"),
        (["--local-sgd-cpu-offload"], "takes a worker's own time in a round; give that time as --round-work"),
        (["--local-sgd-pseudo-grad-reducer", "pairwise"], "--local-sgd-pseudo-grad-reducer is not simulated"),
        (["--parameters", "1e9"], "--parameters is given beside the model's shape; drop it, or --model"),
        (["--sweep", "bandwidth"], "write NAME=V1,V2"),
        (["--sweep", "bandwidth=1:0:3"], "must be above 0"),
        (["--sweep", "json=1"], "--sweep json: --json is not a setting with one value; --help lists them: --workers, "),
        (["--sweep", "local-sgd-eager-updates=1"], "--local-sgd-eager-updates has no values to sweep; simulate"),
        (["--sweep", "csv=a,b"], "--sweep csv: --csv is not a setting with one value; --help lists them"),
        (["--sweep", "bandwith=1"], "--bandwith is not a setting with one value; did you mean --bandwidth?"),
        (["--sweep", "local-sgd-codec=int4,int3"], "--sweep local-sgd-codec=int3: invalid choice"),
        (["--sweep", "bandwidth=1,-1"], "--bandwidth is -1; give a number from 1e-06 to 1e+09 (--sweep bandwidth=-1)"),
        (["--sweep", "seed=1,2,1"], "--sweep seed: 1 is given more than once; give each value once"),
        (["--csv", "a.csv"], "--csv has no effect without --sweep"),
        (["--sweep", "bandwidth=1,2", "--sweep", "bandwidth=3"], "--sweep bandwidth is given 2 times; give all its"),
        (["--sweep", "bandwidth=1,2", "--csv", "nowhere/a.csv"], "--csv nowhere/a.csv: there is no folder nowhere"),
        (["--sweep", "bandwidth=1,2", "--csv", "."], "--csv . is a folder; name a file"),
        (["--sweep", "bandwidth=1,2", "--png", "a.txt"], "--png a.txt: its ending names no kind of picture; give a"),
        (["--sweep", "bandwidth=1,2", "--png", "a"], "--png a: its ending names no kind of picture; give a name that"),
        (["--sweep", "bandwidth=1,2", "--csv", "a.png", "--png", "./a.png"], "--csv and --png are both a.png; name"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([*LLAMA, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spes-num-train-experts-per-node", "2"], "-node is of experts that owners train, which are not simulated"),
        (["--spes-config", "x"], "--spes-config is of experts that owners train, which are not simulated; drop it"),
        (["--merge-alpha-start", "0.05"], "--merge-alpha-start is of experts that owners train, which are not"),
        (["--sync-steps", "5"], "--sync-steps is --sync-service-interval here; give that"),
        (["--density=0.5"], "--density, of a run at the server, decides over no time and no byte that are simulated"),
        (["--qourum", "3"], "did you mean --quorum?"),
        (["--server-b", "3"], "did you mean --server-bandwidth?"),
    ],
)
def test_options_of_a_run_at_a_server_are_refused_with_the_reason(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([*SERVICE, *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_whole_numbers_are_also_written_as_1e4(capsys: pytest.CaptureFixture[str]):
    words = ["--steps", "1e4", "--local-sgd-sync-interval", "1e2", "--json"]
    assert main([*LLAMA, *words]) == 0
    assert json.loads(capsys.readouterr().out)["local SGD"]["worker_steps"] == 40_000
    with pytest.raises(SystemExit):
        main([*LLAMA, "--steps", "1.5"])
    assert "argument --steps: invalid int value: '1.5'" in capsys.readouterr().err


BY_TIME = [*JOB, "--parameters", "1e9", "--local-sgd-use-async", "--steps", "30"]
SERVICE_BY_TIME = [*SERVICE[:-2], "--sync-service-interval-seconds"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            [*BY_TIME, "--local-sgd-sync-time", "150.1"],
            "--local-sgd-sync-time 150.1 is longer than the 150 s of the run's training, so that no round falls into",
        ),
        # Half of the workers take twice as long: together they make three steps in the time of two.
        (
            [*BY_TIME, "--slow-workers", "2", "--slow-factor", "2", "--local-sgd-sync-time", "201"],
            "--local-sgd-sync-time 201 is longer than the 200 s of the run's training",
        ),
        (BY_TIME, "--local-sgd-sync-time 600 is longer than the 150 s"),
        (
            [*BY_TIME, "--local-sgd-sync-time", "50", "--local-sgd-min-total-global-steps", "121"],
            "--local-sgd-min-total-global-steps 121 is more than the 120 steps of all workers together, so that no",
        ),
        (
            [*BY_TIME, "--local-sgd-sync-time", "50", "--save-interval", "4", "--save-seconds", "1"],
            "--save-interval 4 is longer than the run's 3 rounds, so that no checkpoint falls into it",
        ),
        ([*SERVICE_BY_TIME, "1001"], "--sync-service-interval-seconds 1001 is longer than the 1000 s of the run's"),
    ],
)
def test_rounds_by_time_that_no_run_has_time_for_are_refused(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert said in error and "lower it or raise --steps" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        [*BY_TIME, "--local-sgd-sync-time", "150", "--local-sgd-min-total-global-steps", "120"],
        [*SERVICE_BY_TIME, "1000"],
    ],
)
def test_a_round_by_time_at_the_end_of_the_run_is_one(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*command, "--json"]) == 0
    *_, run = json.loads(capsys.readouterr().out).values()
    assert run["rounds"] == 1


ENORMOUS = "1" + "0" * 400
"""A whole number that no float holds."""


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (LLAMA, ["--workers", "1000000000000000000"], "--workers is 1000000000000000000; give a number from 1 to"),
        (LLAMA, ["--workers", ENORMOUS], "--workers is a number of more than 20 digits; give a number from 1 to"),
        (LLAMA, ["--worker-gpus", "1000001"], "--worker-gpus is 1000001; give a number from 1 to 1000000"),
        (LLAMA, ["--bandwidth", "1e-300"], "--bandwidth is 1e-300; give a number from 1e-06 to 1e+09"),
        (LLAMA, ["--bandwidth", "-1e9"], "--bandwidth is -1e+09; give a number from 1e-06 to 1e+09"),
        (LLAMA, ["--step-seconds", "1e300"], "--step-seconds is 1e+300; give a number from 1e-06 to 1e+06, or 0 for"),
        (LLAMA, ["--jitter", "1e-200"], "--jitter is 1e-200; give a number from 1e-06 to 3, or 0 for none"),
        (LLAMA, ["--speed-spread", "1e-200"], "--speed-spread is 1e-200; give a number from 1e-06 to 1, or 0"),
        (LLAMA, ["--seed", ENORMOUS], "--seed is a number of more than 20 digits; give a number from 0 to 92233720"),
        (LLAMA, ["--steps", "1000000000"], "--steps is 1000000000; give a number from 1 to 10000000"),
        (
            LLAMA,
            ["--steps", "10000000", "--local-sgd-sync-interval", "1"],
            "--local-sgd-sync-interval 1 makes 10000000 rounds, of which at most 1000000 are simulated; raise it or",
        ),
        (
            LLAMA,
            ["--steps", "10000000", "--local-sgd-sync-interval", "50", "--local-sgd-fragments", "8"],
            "--local-sgd-sync-interval 50 makes 1600000 rounds of fragments",
        ),
        (
            LLAMA,
            ["--steps", "10000000", "--local-sgd-sync-interval", "500000", "--local-sgd-fragments", "8"],
            "--local-sgd-sync-interval 500000 with 8 fragments is too long to be simulated",
        ),
        (LLAMA, ["--steps", "10000000", "--save-interval", "1", "--save-seconds", "1"], "makes 10000000 checkpoints"),
        (LLAMA, ["--hidden-size", ENORMOUS], "--hidden-size is a number of more than 20 digits; give at most 10000000"),
        (LLAMA, ["--ffn-hidden-size", "10000000", "--hidden-size", "10000000"], "has 22400613140000000 parameters"),
        (JOB, ["--parameters", "1e300"], "--parameters is 1e+300; give a number from 1 to 1000000000000000"),
        (JOB, ["--parameters", "1e9", "--num-layers", "2000000"], "--num-layers is 2000000; give a number from 1 to"),
        (
            JOB,
            ["--parameters", "1e9", "--local-sgd-fragments", ENORMOUS],
            "--local-sgd-fragments is a number of more than 20 digits; give a number from 1 to 1000000",
        ),
        (
            [*JOB, "--parameters", "1e9", "--step-seconds", "0"],
            ["--tflops", "1e-6", "--step-tokens", "1000000000000"],
            "--tflops 1e-06 makes a step of 6e+15 s; a step is from 1e-06 to 1e+06",
        ),
        (SERVICE, ["--latency", "1e300"], "--latency is 1e+300; give a number from 0 to 1e+06"),
        (SERVICE, ["--mtbf-hours", "1e-300"], "--mtbf-hours is 1e-300; give a number from 1e-06 to 1e+09, or 0"),
        (SERVICE, ["--steps", "0"], "--steps is 0; give a number from 1 to 10000000"),
        (
            SERVICE,
            ["--steps", "1000000", "--sync-service-interval", "1"],
            "--sync-service-interval 1 makes 4000000 contributions, of which at most 1000000 are simulated",
        ),
    ],
)
def test_numbers_that_no_run_has_are_refused_by_name_in_one_line(
    command: list[str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*command, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--step-seconds", "1e-6", "--bandwidth", "1e-6", "--latency", "1e6", "--jitter", "3"],
        ["--step-seconds", "1e6", "--bandwidth", "1e9", "--slow-workers", "1", "--slow-factor", "1000"],
        ["--local-sgd-use-async", "--local-sgd-sync-interval", "1", "--local-sgd-sync-time", "1e-300"],
    ],
)
def test_the_ends_of_what_is_allowed_give_figures(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*LLAMA, "--steps", "1000", *words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert all(run["worker_steps"] == 4000 and 0 <= run["utilisation"] <= 1 for run in runs.values())


@pytest.mark.parametrize("hours", ["1e-4", "0.001"])
def test_peers_that_fail_faster_than_they_contribute_end_the_simulation(
    hours: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*SERVICE, "--mtbf-hours", hours]) == 2
    error = capsys.readouterr().err
    assert "does not get from one round to the next" in error and "a larger --mtbf-hours" in error
    assert error.count("\n") == 1
