# SPDX-License-Identifier: Apache-2.0
"""Every command of the documentation is one: its program exists and takes its options, and a test runs it."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_ext.cli.main import make_parser
from tests.packaging.documented import OTHERS, OWN, Command, all_commands, commands_of
from tests.packaging.machines import ROOT
from tests.packaging.what_runs_commands import NOT_RUN, RUN_BY
from tests.support.distributed import run_ranks

COMMANDS = all_commands()

NUMBERS = {"K", "N", "PORT", "S"}
"""Words of a synopsis that stand for numbers."""
STANDS_FOR_MORE = {"...", "ARGS", "SUBSTITUTED"}
OF_EXAMPLES = {"--parameter-norm-interval"}
"""Options of the package in examples/extension, which is not installed."""


def entry_of(command: Command, table: dict[str, str]) -> str:
    """Return the longest key of a table with which a command begins; none is empty."""
    found = [key for key in table if f"{command.line} ".startswith((f"{key} ", f"{key}="))]
    return max(found, key=len, default="")


def complaint(parse, words: list[str]) -> str:
    """Return what a parser says against words; nothing if it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parse(words)
    except SystemExit as end:
        return "" if end.code in (0, None) else said.getvalue().strip().splitlines()[-1]
    return ""


def flags_of_megatron(command: Command) -> list[str]:
    """Return the words that Megatron's parser gets: those under torchrun, those behind `explain --`, or flags alone."""
    words = list(command.words)
    if words[0] == "torchrun":
        options = get_args_parser().parse_args([word for word in words[1:] if word != "..."])
        words = options.training_script_args
        if options.training_script == "megatron_ext":
            assert options.module and words[0].endswith(".py"), command
            words = words[1:]
        else:
            assert (ROOT / options.training_script).is_file(), command
    elif words[0] == "megatron-ext":
        words = words[words.index("--") + 1 :]
    return [word for word in words if word not in STANDS_FOR_MORE]


def refused_by_megatron(lines: list[list[str]]) -> list[str]:
    """Return what Megatron's parser, with our options, says against lines of flags. Runs in a rank."""
    from tests.support.parsers import full_parser

    parser = full_parser()
    return [said for words in lines if (said := complaint(parser.parse_args, words))]


def text_of_script(path: Path) -> str:
    """Return the text of a script, and of those that it reads or starts."""
    files = {path, *path.parent.glob("lib/*"), *path.parent.glob("*.py"), ROOT / "scripts/lib/quickstart.sh"}
    modules = re.findall(r"-m (megatron_ext[\w.]+)", path.read_text(encoding="utf-8"))
    files |= {ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file())


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_test_runs_it_or_it_is_listed_by_name_with_the_reason(command: Command):
    run, not_run = entry_of(command, RUN_BY), entry_of(command, NOT_RUN)
    known = run or not_run or (command.head in OTHERS and command.head not in {"pip", "sphinx-build"})
    assert known, f"{command}: add it to tests/packaging/what_runs_commands.py"


def test_the_tests_that_run_commands_exist_and_no_entry_is_left_over():
    for target in RUN_BY.values():
        file, _, name = target.partition("::")
        assert (ROOT / file).exists(), target
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), target
    assert [key for key in NOT_RUN if not any(entry_of(command, NOT_RUN) == key for command in COMMANDS)] == []


def test_the_megatron_ext_command_takes_what_is_written():
    parser = make_parser()
    found = [command for command in COMMANDS if command.head == "megatron-ext"]
    assert len(found) > 30
    for command in found:
        words = ["1" if word in NUMBERS else word for word in command.words[1:] if word not in STANDS_FOR_MORE]
        assert complaint(parser.parse_args, words) == "", command


def test_megatron_takes_the_flags_that_are_written():
    heads = ("torchrun ", "megatron-ext explain ", "--")
    found = [command for command in COMMANDS if command.line.startswith(heads)]
    assert len(found) > 8
    lines = []
    for command in found:
        words = flags_of_megatron(command)
        for option in OF_EXAMPLES & set(words):
            del words[words.index(option) : words.index(option) + 2]
        lines.append(words)
    (refused,) = run_ranks(refused_by_megatron, 1, lines)
    assert refused == []


def test_scripts_exist_and_know_the_options_and_variables_that_they_are_given():
    found = [command for command in COMMANDS if command.is_script]
    assert len(found) > 15
    for command in found:
        path = ROOT / command.head
        assert path.is_file() and path.stat().st_mode & 0o100, command
        text = text_of_script(path)
        for name in command.assigned:
            assert re.search(rf"\b{name}\b", text), f"{command}: {name}"
        for option in (word.partition("=")[0] for word in command.words[1:] if word.startswith("--")):
            assert option in text, f"{command}: {option}"


def test_python_modules_and_scripts_know_the_options_that_they_are_given():
    found = [command for command in COMMANDS if command.head == "python" and command.words[1:3] != ("-m", "pip")]
    assert len(found) > 15
    for command in found:
        if command.words[1] == "-m":
            name, options = command.words[2], command.words[3:]
            if name in ("pytest", "zipfile"):
                continue
            parts = ROOT.joinpath(*name.split("."))
            files = [parts.with_suffix(".py")] if parts.with_suffix(".py").is_file() else list(parts.glob("*.py"))
        else:
            files, options = [ROOT / command.words[1]], command.words[2:]
        assert files and all(file.is_file() for file in files), command
        text = "".join(file.read_text(encoding="utf-8") for file in (*files, ROOT / "benchmarks/command_line.py"))
        for option in (word.partition("=")[0] for word in options if word.startswith("--")):
            assert f'"{option}"' in text, f"{command}: {option}"


def test_files_of_the_repository_that_commands_name_exist():
    named = 0
    for command in COMMANDS:
        assert command.head in OWN | OTHERS or command.is_script or command.head.startswith("--"), command
        for word in command.words:
            if re.match(r"(benchmarks|configs|docs|examples|scripts|tests)/[\w./-]+$", word) and "_build" not in word:
                assert (ROOT / word).exists(), command
                named += 1
    assert named > 20


def test_commands_are_found_in_blocks_over_several_lines_and_behind_assignments(tmp_path: Path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "Run\n\n    BACKEND=cpu ./examples/a.sh --fast   # soon\n\nor\n\n```bash\n"
        "megatron-ext data check one \\\n    two && torchrun ... -m megatron_ext x.py <your arguments> --save RUN\n"
        'mapfile -t WORDS <flags.txt && torchrun x.py "${WORDS[@]}"\n'
        "megatron-ext server status [--json] [--tls-ca F [--tls-cert F]] > out.txt\n```\n\n    figures 1 2\n"
    )
    monkeypatch.setattr("tests.packaging.documented.ROOT", tmp_path)
    assert [(command.assigned, command.line) for command in commands_of(page)] == [
        ((), "megatron-ext data check one two"),
        ((), "torchrun ... -m megatron_ext x.py SUBSTITUTED --save RUN"),
        ((), "mapfile -t WORDS <flags.txt"),
        ((), "torchrun x.py SUBSTITUTED"),
        ((), "megatron-ext server status --json --tls-ca F --tls-cert F"),
        (("BACKEND",), "examples/a.sh --fast"),
    ]
