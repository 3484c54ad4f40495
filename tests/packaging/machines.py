# SPDX-License-Identifier: Apache-2.0
"""Stand-in machines for the tests of the shell scripts, and what the wheel's tests share."""

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What the scripts use in addition to bash. Everything else, Python above all, is absent from a stand-in machine.
COMMANDS = ["bash", "cat", "cksum", "dirname", "flock", "grep", "ls", "mkdir", "mv", "rm", "tail"]


@dataclass
class Machine:
    """A machine with its own PATH and home, below one temporary folder."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def python(self, path: Path, version: str, *, without: str = "") -> Path:
        """Write an interpreter that claims `version`: the real one, told so before it runs the code."""
        modules = f"; sys.modules[{without!r}] = None" if without else ""
        prelude = (
            f"import sys; sys.version_info = ({version.replace('.', ', ')}, 'final', 0)"
            f"; sys._base_executable = {str(path)!r}{modules}; exec(sys.argv[1])"
        )
        body = f'[ "$1 $2" = "-I -c" ] || exit 3\nexec "{sys.executable}" -I -c "{prelude}" "$3"'
        return script(path, body)

    def bash(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run bash code on this machine; its standard output and error come back apart."""
        return subprocess.run(
            [str(self.bin / "bash"), "-c", "set -euo pipefail\n" + code],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.home), **self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )


def script(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class BuiltWheel:
    """The wheel built from a copy of the sources."""

    file: Path
    sources: Path

    def texts(self) -> Mapping[str, bytes]:
        """Return the content of every file in the wheel."""
        with zipfile.ZipFile(self.file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
