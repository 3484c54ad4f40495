# SPDX-License-Identifier: Apache-2.0
"""docs/from-hotspa.md: its commands run, its options are there, and its strategies are those that the scripts take."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from tests.examples.desk import Desk
from tests.support.distributed import REPOSITORY
from tests.support.every_run import one_of_each
from tests.support.parsers import full_parser

TEXT = (REPOSITORY / "docs" / "from-hotspa.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


# What the scripts do with their arguments has tests of its own.
@pytest.mark.parametrize("line", one_of_each(COMMANDS, {2, 6}))
def test_every_command_runs(line: str, desk: Desk, capsys: pytest.CaptureFixture[str]):
    words = shlex.split(line)
    if words[0] == "megatron-ext":
        assert main(words[1:]) == 0
        assert "8,1,1" in capsys.readouterr().out
        return
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    script, *arguments = [
        str(REPOSITORY / word) if word.startswith("examples/") else word for word in words[len(environment) :]
    ]
    code, output = desk.run(Path(script), arguments, **environment)
    assert code == 0, output
    if environment:
        assert "--hot-switch-strategies 1,4,2 8,1,1 2,2,2 --hot-switch-bucket-sizes 16384 8192 4096 0" in output
    elif "7b" in arguments and "hot_switch.sh" in script:
        assert "--hot-switch-strategies 1,4,2 8,1,1 2,2,2 --hot-switch-bucket-sizes 32768 16384 4096 0" in output


def test_every_option_that_is_called_ours_is_there_and_takes_the_lists():
    parser = full_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    cells = [line.split(" | ")[-1] for line in TEXT.splitlines() if line.startswith("| ") and " | " in line]
    named = {option for cell in cells for option in re.findall(r"--[a-z][\w-]+", cell)}
    assert len(named) > 20 and named <= known
    lists = re.findall(r"`(--hot-switch-strategies [^`]*--hot-switch-bucket-sizes [^`]*)`", TEXT)
    assert len(lists) == 2
    for flags in lists:
        given, _ = parser.parse_known_args(shlex.split(flags))
        assert len(given.hot_switch_bucket_sizes) == len(given.hot_switch_strategies) + 1
