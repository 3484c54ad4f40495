# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd suggest` as people call it."""

import json

import pytest

from megatron_ext.cli.main import main

WORDS = ["local-sgd", "suggest", "--model", "llama-7b", "--workers", "4", "--step-seconds", "5"]


def test_the_plainest_setting_that_is_good_enough_is_proposed(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "10"]) == 0
    out = capsys.readouterr().out
    assert "gradients in bf16, nothing hidden: 0.236" in out
    assert "proposed: --use-local-sgd --local-sgd-sync-interval 100 --local-sgd-codec bf16\nutilisation 0.969" in out


def test_a_fast_link_needs_no_local_sgd_and_a_slow_one_a_longer_interval(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "800"]) == 0
    assert "local SGD is not worth it on this link" in capsys.readouterr().out
    assert main([*WORDS, "--bandwidth", "0.001"]) == 0
    assert "nothing here reaches 0.95; the most is 0.01" in capsys.readouterr().out


def test_all_settings_are_printed_as_json(capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, "--bandwidth", "1", "--longest-interval", "500", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["interval"] for one in found["settings"]} == {1, 5, 10, 25, 50, 100, 250, 500}
    assert found["proposed"] in found["settings"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bandwidth", "0"], "--bandwidth is 0; give a number above 0"),
        (["--bandwidth", "1", "--target", "1"], "--target is 1; give a number between 0 and 1"),
        (["--bandwidth", "1", "--longest-interval", "0"], "--longest-interval is 0; give at least 1"),
        (["--bandwidth", "1", "--model", "gpt-5"], "'gpt-5' is not known"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 2
    assert said in capsys.readouterr().err
