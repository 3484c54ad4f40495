# SPDX-License-Identifier: Apache-2.0
"""A checkout of Megatron whose helpers cannot be compiled is refused in one line."""

import os
from functools import partial

from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain


def be_a_checkout_without(folder):
    """Let the package of the datasets have a Makefile, so that the library of the wheel does not count.

    Megatron calls make in the folder of the wheel, which has none.
    """
    import megatron.core.datasets

    megatron.core.datasets.__path__.append(folder)


def test_helpers_that_cannot_be_compiled_are_told_of_once(tmp_path):
    (tmp_path / "Makefile").touch()
    exits = run_failing_pretrain(toy_gpt(), 2, before=partial(be_a_checkout_without, os.fspath(tmp_path)))
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: Megatron's index helpers in ") == 1
    assert "pip install pybind11" in errors and "Traceback" not in errors
    assert all(rank.exit_code for rank in exits)
