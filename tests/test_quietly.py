# SPDX-License-Identifier: Apache-2.0
"""Commands that train nothing say what is theirs alone."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megatron_ext.quietly import quietly
from tests.convert import models


def test_neither_warnings_nor_loggers_are_heard_inside_and_both_afterwards(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    log = logging.getLogger("tests.quietly")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with quietly():
            warnings.warn("no GPU", stacklevel=1)
            log.warning("no GPU")
            log.error("no disk")
            print("ours")
        with pytest.raises(ValueError, match="ours"), quietly():
            raise ValueError("ours")
        assert not heard
        warnings.warn("after", stacklevel=1)
        log.warning("after")
    assert [str(warning.message) for warning in heard] == ["after"]
    assert [record.getMessage() for record in caplog.records] == ["no disk", "after"]
    assert capsys.readouterr().out == "ours\n"


def test_a_conversion_is_quiet_about_gpus_that_it_does_not_need(tmp_path: Path):
    models.save("llama", tmp_path / "model")
    program = (
        "from megatron_ext.cli.main import main\n"
        "for words in (['from-hf', 'model', 'start'], ['upcycle', 'start', 'mixture'], ['to-hf', 'mixture', 'back']):\n"
        "    assert main(['convert', *words]) == 0\n"
    )
    # With a toolkit and no device torch warns as it is imported.
    environ = {**os.environ, "CUDA_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    ours = ("reading ", "writing ")  # on a slow machine
    assert [line for line in done.stderr.splitlines() if not line.startswith(ours)] == []
