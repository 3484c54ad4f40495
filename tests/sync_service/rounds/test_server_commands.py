# SPDX-License-Identifier: Apache-2.0
"""Commands that messages tell people to run: the parser takes them, whatever the folder is called."""

import shlex
from pathlib import Path

import pytest

from megatron_ext.cli.main import make_parser
from megatron_ext.cli.server import run_compact, run_recover
from megatron_ext.sync_service.rounds.server_commands import compact_command, recover_command


@pytest.mark.parametrize("url", [None, "file:///its copy"], ids=["alone", "with a copy"])
@pytest.mark.parametrize("command", [recover_command, compact_command])
def test_a_command_that_is_told_means_the_folder_and_its_copy(command, url):
    folder = Path("/srv/the first server/runs/demo")
    program, *words = shlex.split(command(folder, url))
    options = make_parser().parse_args(words)
    assert (program, options.dir, options.state) == ("megatron-ext", folder, url)
    assert options.func is {recover_command: run_recover, compact_command: run_compact}[command]
