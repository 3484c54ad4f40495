# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd suggest` as people call it."""

import argparse
import json
import re

import pytest

from megatron_ext.cli.main import main
from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig
from megatron_ext.local_sgd.combinations import method_problems
from megatron_ext.local_sgd.feature import LocalSGDFeature
from megatron_ext.local_sgd.streaming import StreamingConfig, fragment_problem
from megatron_ext.outer.places import Where

WORDS = ["local-sgd", "suggest", "--model", "llama-7b", "--workers", "4", "--step-seconds", "5"]


def test_the_plainest_setting_that_is_good_enough_is_proposed(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "10"]) == 0
    out = capsys.readouterr().out
    assert "gradients in bf16, nothing hidden: 0.236" in out
    assert (
        "proposed: --use-local-sgd --local-sgd-workers 4 --local-sgd-sync-interval 100 --local-sgd-codec bf16\n"
        "utilisation 0.969, 4.10 times synchronous" in out
    )


def test_a_fast_link_needs_no_local_sgd_and_a_slow_one_a_longer_interval(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "800"]) == 0
    assert "local SGD is not worth it on this link" in capsys.readouterr().out
    assert main([*WORDS, "--bandwidth", "0.1", "--longest-interval", "50"]) == 0
    assert "nothing here reaches 0.95; the most is 0.601, with --use-local-sgd" in capsys.readouterr().out


@pytest.mark.parametrize("link", ["0.001", "0.0001 --latency 1e9", "1e-300", "1 --latency 1e300"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_nothing_is_proposed_where_workers_would_wait_longer_than_they_train(
    link: str, more: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*WORDS, "--bandwidth", *link.split(), "--step-tokens", "1000", *more]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "nothing fits this link: workers would train for at most" in err and "--local-sgd-" not in err


def test_the_time_of_a_token_is_told_beside_the_utilisation(capsys: pytest.CaptureFixture[str]):
    words = [*WORDS, "--bandwidth", "10", "--step-tokens", "1000000"]
    assert main(words) == 0
    out = capsys.readouterr().out
    # 5 s by 4 workers with a million tokens each, and by the part of the time in which they train.
    assert "nothing hidden: 0.236, 5.286 us a token" in out
    assert re.search(r"^bf16 +20\.18 +16\.1 +100 +0\.969 +1\.29 +2 +2 +1\.000 +1\.25$", out, re.MULTILINE)
    assert "utilisation 0.969, 1.29 us a token, 4.10 times" in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["synchronous_token_seconds"] == pytest.approx(1.25e-6 / found["synchronous"])
    for one in found["settings"]:
        assert one["token_seconds"] == pytest.approx(1.25e-6 / one["utilisation"])
        assert one["step_seconds"] == pytest.approx(5 / one["utilisation"])


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--bandwidth", "10"], "--local-sgd-codec bf16"),
        (["--bandwidth", "1"], "--local-sgd-fragments 8 --local-sgd-fragment-sync-delay 10"),
        (["--bandwidth", "0.1"], "--local-sgd-codec int4 --local-sgd-fragments 8 --local-sgd-fragment-sync-delay 12"),
        (["--bandwidth", "0.1", "--longest-interval", "50"], "--local-sgd-fragments 2 --local-sgd-fragment-sync-delay"),
        (["--bandwidth", "0.1", "--num-layers", "5"], "--local-sgd-fragment-sync-delay"),
    ],
)
def test_the_flags_are_accepted_by_a_run(words: list[str], flags: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 0
    said = re.search(r"--use-local-sgd [^\n.]*(\.\d+)?", capsys.readouterr().out)
    assert said is not None and flags in said[0]
    parser = argparse.ArgumentParser()
    LocalSGDFeature().add_arguments(parser)
    args = parser.parse_args(said[0].split())
    config, streaming = LocalSGDConfig.from_args(args), StreamingConfig.from_args(args)
    outer, gta = OuterOptimizerConfig.from_args(args), GTAConfig.from_args(args)
    assert config.problems() + method_problems(config, outer, gta, streaming, Where.JOB) == []
    assert fragment_problem(streaming.fragments, 5 if "5" in words else 32, "layers") is None


def test_all_settings_are_printed_as_json(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "1", "--longest-interval", "500", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["interval"] for one in found["settings"]} == {1, 5, 10, 25, 50, 100, 250, 500}
    assert {one["fragments"] for one in found["settings"]} == {1, 2, 4, 8}
    assert found["proposed"] in found["settings"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bandwidth", "0"], "--bandwidth is 0; give a number above 0"),
        (["--bandwidth", "1", "--step-tokens", "0"], "--step-tokens is 0; give a number of at least 1"),
        (["--bandwidth", "1", "--target", "1"], "--target is 1; give a number between 0 and 1"),
        (["--bandwidth", "1", "--longest-interval", "0"], "--longest-interval is 0; give at least 1"),
        (["--bandwidth", "1", "--model", "gpt-5"], "'gpt-5' is not known"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err
