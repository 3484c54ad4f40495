# SPDX-License-Identifier: Apache-2.0
"""The commands of the documentation: where they stand, their words, and what runs them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.packaging.machines import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md", "patches/README.md")),
    ROOT / "benchmarks" / "README.md",
]

OTHERS = {
    *("cd", "curl", "docker", "export", "git", "grpc_health_probe", "ip", "kubectl", "mapfile", "openssl", "pip"),
    *("printf", "sbatch", "scp", "source", "sphinx-build", "srun", "ssh", "tc"),
}
"""Programs of others, whose options are not looked at; the files of this repository that they are given are."""

OWN = {"megatron-ext", "torchrun", "python", "pytest"}
_OPERATORS = {"&&", "||", "|", ";", "&"}
_FOLDERS = ("./", "benchmarks/", "configs/", "docs/", "examples/", "patches/", "scripts/", "tests/")


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    words: tuple[str, ...]
    """Without what stands behind `#`, assignments in front, and redirections."""
    assigned: tuple[str, ...] = ()
    """Variables that are set for it."""

    @property
    def head(self) -> str:
        return self.words[0].removeprefix("./")

    @property
    def is_script(self) -> bool:
        return "/" in self.words[0]

    @property
    def line(self) -> str:
        return " ".join((self.head, *self.words[1:]))

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def blocks(text: str) -> Iterator[str]:
    """Yield the blocks of a page that hold commands: those that say so, and indented ones that begin with one."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        if language in ("bash", "console", "sh", "shell"):
            yield block
    plain = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?<=\n\n)(?:(?: {4}.*)\n)+", plain):
        lines = block.lstrip().splitlines()
        first = lines[0].split()
        while first and re.fullmatch(r"\w+=\S*", first[0]):
            first.pop(0)
        if first and (first[0] in OWN | OTHERS or first[0].startswith((*_FOLDERS, "--"))):
            yield block


def lines(block: str) -> Iterator[str]:
    """Yield the lines of a block, those that are continued as one."""
    joined = re.sub(r"\\\n\s*", " ", block)
    # A synopsis is continued by a line of options in brackets.
    joined = re.sub(r"\n +(?=\[--)", " ", joined)
    while re.search(r"\[(?=--)([^\[\]]*)\]", joined):
        joined = re.sub(r"\[(?=--)([^\[\]]*)\]", r"\1", joined)
    yield from (line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page in their order, and the flags that stand there without one."""
    name = str(page.relative_to(ROOT))
    found = []
    for block in blocks(page.read_text(encoding="utf-8")):
        for line in lines(block):
            line = re.sub(r'<[^>]*>|\$\([^)]*\)|"\$\{\w+\[@\]\}"', "SUBSTITUTED", line.removeprefix("$ "))
            for words in _separated(shlex.split(line, comments=True)):
                assigned = []
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    assigned.append(words.pop(0).partition("=")[0])
                if words:
                    found.append(Command(name, tuple(words), tuple(assigned)))
    return found


def _separated(words: list[str]) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without redirections."""
    taken: list[str] = []
    for index, word in enumerate(words):
        if word in _OPERATORS:
            yield taken
            taken = []
        elif not re.match(r"\d?>", word) and (index == 0 or not re.fullmatch(r"\d?>>?", words[index - 1])):
            taken.append(word)
    yield taken


def all_commands() -> list[Command]:
    """Return the commands of all pages."""
    return [command for page in PAGES for command in commands_of(page)]
