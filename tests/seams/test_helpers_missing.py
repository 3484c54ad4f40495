# SPDX-License-Identifier: Apache-2.0
"""A checkout of Megatron whose helpers cannot be compiled is refused in one line."""

import os
from functools import partial

from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain


def be_a_checkout_without(folder):
    """Let the package of the datasets have a Makefile, so that the library of the wheel does not count.

    Megatron calls make in the folder of the wheel, which has none.
    """
    import megatron.core.datasets

    megatron.core.datasets.__path__.append(folder)


def be_a_checkout_with(folder):
    """Let the package of the datasets have a Makefile that fails, and the library beside it."""
    import shutil

    import megatron.core.datasets
    from megatron.core.datasets import helpers_cpp, utils

    # A process loads it once, and this one has loaded the wheel's.
    helpers_cpp.__file__ = shutil.copy(helpers_cpp.__file__, folder)
    megatron.core.datasets.__path__.insert(0, folder)
    utils.__file__ = os.path.join(folder, "utils.py")


def test_a_checkout_that_was_compiled_trains_though_it_cannot_be_compiled_again(tmp_path):
    (tmp_path / "Makefile").write_text("default:\n\tfalse\n")
    (rank,) = run_pretrain(toy_gpt(train_iters=1), 1, before=partial(be_a_checkout_with, os.fspath(tmp_path)))
    assert "which was compiled before" in rank.stdout and len(rank.losses) == 1


def test_helpers_that_cannot_be_compiled_are_told_of_once(tmp_path):
    (tmp_path / "Makefile").touch()
    exits = run_failing_pretrain(toy_gpt(), 2, before=partial(be_a_checkout_without, os.fspath(tmp_path)))
    errors = "".join(rank.stderr for rank in exits)
    assert errors.count("megatron-ext: error: Megatron's index helpers in ") == 1
    assert "pip install pybind11" in errors and "Traceback" not in errors
    assert all(rank.exit_code for rank in exits)
