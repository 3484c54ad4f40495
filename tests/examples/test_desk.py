# SPDX-License-Identifier: Apache-2.0
"""A wait for a script that fails reports where all of its processes are."""

from contextlib import ExitStack

import pytest

from tests.examples.desk import Desk, finish_together

WAITS = """
import time

def waits_in_vain():
    time.sleep(1000)

waits_in_vain()
"""


def test_scripts_that_do_not_end_show_the_stacks_of_what_they_started(desk: Desk) -> None:
    (desk.folder / "waits.py").write_text(WAITS)
    # A rank has a session of its own, and its parent is not the script.
    desk.command("waits", "setsid python waits.py & wait")
    desk.command("ends", "echo ended; exit 3")
    with ExitStack() as stack:
        scripts = [stack.enter_context(desk.start(desk.folder / "bin" / name)) for name in ("ends", "waits")]
        with pytest.raises(AssertionError, match=r"after 5 s the exit codes are \[3, None\]") as raised:
            finish_together(scripts, timeout=5.0)
    assert "ended" in str(raised.value)
    assert "in waits_in_vain" in str(raised.value)
