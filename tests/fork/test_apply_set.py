# SPDX-License-Identifier: Apache-2.0
"""`patches/apply.sh` puts a set into a fork as a whole and takes it out again, or changes nothing and says why."""

import shutil
import subprocess
from pathlib import Path

import megatron.core
import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.fork.apply_set import apply, patch_of
from megatron_ext.fork.patch_set import ADDED_FILE
from megatron_ext.fork.source import ForkSource
from tests.support.distributed import REPOSITORY

INSTALLED = Path(megatron.core.__path__[0]).parents[1]
INFO = "megatron/core/package_info.py"
TRAINING = "megatron/training/training.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(REPOSITORY / "patches" / "apply.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def contents(fork: Path) -> dict[Path, bytes]:
    return {path.relative_to(fork): path.read_bytes() for path in sorted(fork.rglob("*")) if path.is_file()}


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Copy those of the installed Megatron's files that its set changes."""
    folder = tmp_path / "fork"
    patch = patch_of(ForkSource(INSTALLED), REPOSITORY / "patches")
    changed = [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    for name in [INFO, *changed]:
        if name != str(ADDED_FILE):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(INSTALLED / name, folder / name)
    return folder


def test_a_dry_run_by_default_then_in_and_out_again_with_every_byte_as_before(fork: Path):
    before = contents(fork)
    dry = run(fork)
    assert dry.returncode == 0, dry.stderr
    assert "would put hook points into" in dry.stdout
    assert "nothing was changed; --write does it" in dry.stdout
    assert contents(fork) == before

    assert run(fork, "--write").returncode == 0
    during = contents(fork)
    assert set(during) - set(before) == {ADDED_FILE}
    assert during[Path(TRAINING)].startswith(before[Path(TRAINING)])
    again = run(fork, "--write")
    assert again.returncode == 2
    assert "already; --reverse takes it out" in again.stderr
    assert contents(fork) == during

    assert run(fork, "--reverse").returncode == 0
    assert contents(fork) == during
    assert run(fork, "--reverse", "--write").returncode == 0
    assert contents(fork) == before
    absent = run(fork, "--reverse", "--write")
    assert absent.returncode == 2
    assert "there is nothing to take out" in absent.stderr


def test_a_rejected_hunk_is_named_with_its_lines_and_a_set_for_the_fork_itself_applies(
    fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with (fork / TRAINING).open("a") as file:
        file.write("ADDED = 1\n")
    before = contents(fork)
    done = run(fork, "--write")
    assert done.returncode == 2
    assert "1 of " in done.stderr
    assert f"{TRAINING} @@ -" in done.stderr
    assert "does not end with the line ')'" in done.stderr
    assert "    from megatron.core.hook_points import declare as _declare" in done.stderr
    assert "--diff > FILE` makes a set for the files as they are; apply it with --patch FILE" in done.stderr
    assert contents(fork) == before

    assert main(["patches", "--fork", str(fork), "--diff"]) == 0
    own = tmp_path / "own.patch"
    own.write_text(capsys.readouterr().out)
    assert run(fork, "--write", "--patch", own).returncode == 0
    assert (fork / TRAINING).read_text().endswith(")\n")
    assert run(fork, "--write", "--patch", own, "--reverse").returncode == 0
    assert contents(fork) == before


@pytest.mark.parametrize("git_settings", ["none", "autocrlf", "eol"])
def test_a_fork_with_crlf_line_ends_takes_its_own_set_and_gives_every_byte_back(
    git_settings: str, fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    if git_settings == "autocrlf":
        (tmp_path / ".gitconfig").write_text("[core]\n\tautocrlf = true\n")
    if git_settings == "eol":
        (fork / ".gitattributes").write_text("* text=auto eol=crlf\n")
    subprocess.run(["git", "init", "-q", str(fork)], check=True)
    files = [fork / "megatron/core/parallel_state.py", fork / TRAINING]
    for file in files:
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    files[0].write_bytes(files[0].read_bytes().removesuffix(b"\r\n"))
    before = contents(fork)
    assert main(["patches", "--fork", str(fork), "--diff"]) == 0
    own = tmp_path / "own.patch"
    own.write_bytes(capsys.readouterr().out.encode())
    done = run(fork, "--write", "--patch", own)
    assert done.returncode == 0, done.stderr
    for file in files:
        during = file.read_bytes()
        assert during.startswith(before[file.relative_to(fork)] + b"\r\n" * (file == files[0]) + b"from ")
        assert during.count(b"\n") == during.count(b"\r\n")
    done = run(fork, "--write", "--patch", own, "--reverse")
    assert done.returncode == 0, done.stderr
    assert contents(fork) == before


def test_line_ends_that_the_release_has_not_are_named(fork: Path):
    file = fork / TRAINING
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    done = run(fork, "--write")
    assert done.returncode == 2
    assert "ends its last line ')' otherwise (CRLF, LF, or not at all)" in done.stderr


@pytest.mark.parametrize("reverse", [[], ["--reverse"]])
def test_a_set_that_is_there_by_half_is_refused(fork: Path, reverse: list[str]):
    run(fork, "--write")
    shutil.copy(INSTALLED / TRAINING, fork / TRAINING)
    before = contents(fork)
    done = run(fork, "--write", *reverse)
    assert done.returncode == 2
    assert "by half" in done.stderr
    assert f"these are the ones without them: {TRAINING}\n" in done.stderr
    assert contents(fork) == before


def test_a_fork_of_another_release_is_refused_by_name(fork: Path):
    info = fork / INFO
    info.write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    done = run(fork, "--write")
    assert done.returncode == 2
    assert "is a fork of Megatron core 0.17.1; there are sets for core_v0.18, core_v0.19, core_v0.20" in done.stderr
    assert f"`megatron-ext patches --fork {fork}` tells" in done.stderr
    assert not (fork / ADDED_FILE).exists()
    no_fork = run(fork / "megatron")
    assert no_fork.returncode == 2
    assert "there is no megatron/core/package_info.py" in no_fork.stderr


def test_a_fork_inside_a_repository_is_changed_like_any_other(fork: Path):
    subprocess.run(["git", "init", "-q", str(fork.parent)], check=True)
    assert run(fork, "--write").returncode == 0
    assert (fork / ADDED_FILE).exists()


def test_a_write_that_ends_half_way_puts_all_files_back(fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = shutil.which("git")
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    fails = 'case "$*" in *--check*) ;; *) echo full >&2; exit 1;; esac'
    wrapper.write_text(f'#!/bin/sh\n"{real}" "$@" || exit 1\n{fails}\n')
    wrapper.chmod(0o755)
    before = contents(fork)
    patch = patch_of(ForkSource(fork), REPOSITORY / "patches")
    with monkeypatch.context() as path:
        path.setenv("PATH", str(wrapper.parent), prepend=":")
        with pytest.raises(UserError, match="nothing was changed, git could not write: full"):
            apply(fork, patch, reverse=False, write=True)
    assert contents(fork) == before


def test_files_that_cannot_be_written_leave_all_as_they_were(fork: Path, monkeypatch: pytest.MonkeyPatch):
    before = contents(fork)
    written = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if path == fork / TRAINING and content != before[Path(TRAINING)]:
            raise OSError(28, "No space left on device", str(path))
        return written(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(UserError, match=r"nothing was changed, .*training\.py cannot be written: No space left"):
        apply(fork, patch_of(ForkSource(fork), REPOSITORY / "patches"), reverse=False, write=True)
    assert contents(fork) == before


def test_what_is_missing_for_the_work_is_named(fork: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"gone\.patch: No such file"):
        apply(fork, tmp_path / "gone.patch", reverse=False, write=False)
    with pytest.raises(UserError, match="there is no diff in it"):
        apply(fork, fork / INFO, reverse=False, write=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="git is not installed"):
        apply(fork, fork / INFO, reverse=False, write=False)
