# SPDX-License-Identifier: Apache-2.0
"""The command lines that the LLaMA scripts print, taken apart."""

import shlex
from pathlib import Path

from tests.examples.desk import Desk
from tests.support.distributed import REPOSITORY


def dry_run(desk: Desk, script: Path, arguments: list[str], **environment: str) -> list[list[str]]:
    """Return the command lines that a script would start on this machine or over ssh, word by word."""
    code, output = desk.run(script, ["--print", *arguments], **environment)
    assert code == 0, output
    # Data that are not here may be of another tokenizer, which the script says beside the lines.
    return [shlex.split(line) for line in output.splitlines() if ".sh: DATA_PATH: there is no" not in line]


def values(words: list[str], option: str) -> list[str]:
    """Return what follows an option."""
    rest = words[words.index(option) + 1 :]
    end = next((number for number, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def launched(words: list[str]) -> list[str]:
    """Return what comes after the variables."""
    return words[words.index("torchrun") :]


def training_arguments(words: list[str]) -> list[str]:
    return words[words.index(str(REPOSITORY / "examples/pretrain_gpt.py")) + 1 :]
