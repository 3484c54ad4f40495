# SPDX-License-Identifier: Apache-2.0
"""All output files or none, whatever happens on the way."""

import io
import json
import multiprocessing
import os
import resource
import signal
import stat
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from megatron_ext.data.output import check_prefix, output_paths, read_sidecar, staging_folder
from megatron_ext.data.prepare import PrepareConfig, prepare
from megatron_ext.errors import UserError
from tests.support.corpus import make, read_texts, run_in_child, write_json_lines

SMALL, LARGE = 1_000, 200_000


def limit_file_size() -> None:
    """Make the kernel stop this process' writes in the middle of the .bin file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 2, LARGE // 2))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    # Two batches' worth of text would do; more makes sure that writing is under way for a while.
    return write_json_lines(tmp_path / "in.jsonl", [f"{n:0100}" for n in range(LARGE // 100)])


def outputs(prefix: Path) -> list[str]:
    return sorted(path.name for path in prefix.parent.iterdir())


def warm_up(tmp_path: Path) -> None:
    """Import Megatron before the fork, not in it."""
    (tmp_path / "one.txt").write_text("x")
    make(tmp_path / "one.txt", tmp_path / "warm-up/corpus")


def test_a_killed_run_leaves_nothing_that_looks_finished_and_the_next_one_clears_up(
    tmp_path: Path, source: Path
) -> None:
    prefix = tmp_path / "out/corpus"

    def killed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel's own kill, in the middle of a write
        limit_file_size()
        make(source, prefix)

    warm_up(tmp_path)
    assert run_in_child(killed) == -signal.SIGXFSZ
    assert outputs(prefix) == [".corpus.partial"]
    assert (prefix.parent / ".corpus.partial/corpus.bin").stat().st_size > 0
    make(source, prefix)
    assert outputs(prefix) == ["corpus.bin", "corpus.idx", "corpus.json"]
    assert len(read_texts(prefix)) == LARGE // 100


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C at the first sign of progress."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.getvalue():
            super().write(text)
            raise KeyboardInterrupt
        return len(text)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_leaves_the_folder_as_it_was(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, workers: int
) -> None:
    prefix = tmp_path / "out/corpus"
    if existing:
        (tmp_path / "one.txt").write_text("x")
        make(tmp_path / "one.txt", prefix)
    monkeypatch.setattr("megatron_ext.data.progress._TERMINAL_SECONDS", 0.0)
    config = PrepareConfig(inputs=(source,), output_prefix=str(prefix), overwrite=True, workers=workers)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, progress_stream=Interrupting())
    assert outputs(prefix) == (["corpus.bin", "corpus.idx", "corpus.json"] if existing else [])
    if existing:
        assert read_texts(prefix) == ["x"]


def test_a_full_disk_is_an_error_that_names_the_output(tmp_path: Path, source: Path) -> None:
    prefix = tmp_path / "out/corpus"

    def fails() -> None:
        limit_file_size()  # Python ignores the signal, so that the write fails as on a full disk
        with pytest.raises(UserError, match=r"output .*out/corpus: cannot be written: File too large"):
            make(source, prefix)

    warm_up(tmp_path)
    assert run_in_child(fails) == 0
    assert outputs(prefix) == []


def test_bad_input_in_the_middle_leaves_no_output(tmp_path: Path, source: Path) -> None:
    with open(source, "a", encoding="utf-8") as file:
        file.write("no JSON\n")
    with pytest.raises(UserError, match=f"in.jsonl:{LARGE // 100 + 1}: not JSON"):
        make(source, tmp_path / "out/corpus")
    assert outputs(tmp_path / "out/corpus") == []


def test_an_output_below_a_file_is_an_error(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        make(source, source / "corpus")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_an_existing_output_is_refused_and_kept(tmp_path: Path, source: Path, suffix: str) -> None:
    path = output_paths(tmp_path / "corpus")[suffix]
    path.write_text("mine")
    with pytest.raises(UserError, match=rf"corpus.{suffix} exists; use --overwrite"):
        make(source, tmp_path / "corpus")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("content", ['{"text": "a"}', '{"text": "a"}\n{"text": "b"}\n', '["a"]', "\xff"])
def test_overwrite_never_destroys_an_input_that_bears_an_outputs_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(content, encoding="latin-1")
    for inputs in (path, tmp_path):
        with pytest.raises(UserError, match=r"corpus.json: is there already and not a description"):
            make(inputs, tmp_path / "corpus", overwrite=True, file_format="jsonl")
    assert path.read_text(encoding="latin-1") == content


def test_the_description_of_another_release_may_be_overwritten(tmp_path: Path, source: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"format": "megatron-ext corpus 0"}')
    with pytest.raises(UserError, match=r"corpus.json exists; use --overwrite"):
        make(source, tmp_path / "corpus")
    make(source, tmp_path / "corpus", overwrite=True)
    assert read_sidecar(tmp_path / "corpus")["documents"] == LARGE // 100


def hold(prefix: Path, held: Event, done: Event) -> None:
    with staging_folder(prefix):
        held.set()
        done.wait(30)


def test_two_processes_cannot_write_the_same_corpus_at_once(tmp_path: Path, source: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "corpus", held, done))
    other.start()
    try:
        assert held.wait(30)
        with pytest.raises(UserError, match="corpus: another process is writing it right now"):
            make(source, tmp_path / "corpus")
        assert (tmp_path / ".corpus.partial").is_dir()
    finally:
        done.set()
        other.join()
    assert other.exitcode == 0
    make(source, tmp_path / "corpus")


def test_a_new_corpus_does_not_meet_megatrons_index_cache_of_the_old_one(
    tmp_path: Path, source: Path
) -> None:
    prefix = tmp_path / "corpus"
    make(source, prefix)
    cache = prefix / "cache/GPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "abc-document_index.npy").write_text("of the old corpus")
    (prefix / "cache/other").mkdir()
    make(source, prefix, overwrite=True)
    assert not cache.exists()
    assert (prefix / "cache/other").is_dir()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{}/", "names a folder; add a name"),
        ("{}/full", "names a folder; add a name, as in .*/full/corpus"),
        ("{}/..", "names a folder"),
        ("", "^--output-prefix is empty; give a name, such as corpus$"),
        ("{}/corpus.bin", "leave out the suffix .bin"),
        ("{}/corpus.idx", "leave out the suffix .idx"),
    ],
)
def test_a_prefix_that_cannot_be_meant_is_refused(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(UserError, match=message):
        check_prefix(given.format(tmp_path))


def test_a_prefix_may_hold_dots_and_megatrons_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "v1.2/cache").mkdir(parents=True)
    prefix = check_prefix(f"{tmp_path}/v1.2")
    assert output_paths(prefix)["bin"] == tmp_path / "v1.2.bin"


def test_files_get_the_permissions_that_new_files_have(tmp_path: Path, source: Path) -> None:
    make(source, tmp_path / "corpus")
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in output_paths(tmp_path / "corpus").values()}
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_the_description_is_read_back_and_refused_when_it_is_not_one(tmp_path: Path, source: Path) -> None:
    make(source, tmp_path / "corpus")
    assert read_sidecar(tmp_path / "corpus")["documents"] == LARGE // 100
    with pytest.raises(UserError, match=r"none.json: No such file or directory; make it with"):
        read_sidecar(tmp_path / "none")
    for content in ("{", "[]", json.dumps({"format": "megatron-ext corpus 0"})):
        (tmp_path / "corpus.json").write_text(content)
        with pytest.raises(UserError, match=r"corpus.json: "):
            read_sidecar(tmp_path / "corpus")


class TestReuse:
    """`reuse` does nothing exactly when doing it again would give the same files."""

    @pytest.fixture
    def prefix(self, tmp_path: Path) -> Path:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.txt").write_text("one")
        make(tmp_path / "in", tmp_path / "corpus", reuse=True)
        return tmp_path / "corpus"

    def test_the_same_call_again_touches_nothing(self, tmp_path: Path, prefix: Path) -> None:
        before = {path: path.stat().st_ino for path in output_paths(prefix).values()}
        first = read_sidecar(prefix)
        for overwrite in (False, True):
            again = make(tmp_path / "in", prefix, reuse=True, overwrite=overwrite)
            assert again.reused
            assert again.sidecar == first
        assert {path: path.stat().st_ino for path in output_paths(prefix).values()} == before

    def test_changed_input_is_refused_without_overwrite_and_made_again_with_it(
        self, tmp_path: Path, prefix: Path
    ) -> None:
        (tmp_path / "in/b.txt").write_text("two")
        with pytest.raises(UserError, match=r"cannot be reused: inputs_digest was .* add --overwrite"):
            make(tmp_path / "in", prefix, reuse=True)
        assert read_texts(prefix) == ["one"]
        assert not make(tmp_path / "in", prefix, reuse=True, overwrite=True).reused
        assert read_texts(prefix) == ["one", "two"]

    def test_another_file_of_the_same_name_size_and_time_is_noticed(self, tmp_path: Path, prefix: Path) -> None:
        path = tmp_path / "in/a.txt"
        times = path.stat()
        path.write_text("two")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UserError, match="cannot be reused: inputs_digest was"):
            make(tmp_path / "in", prefix, reuse=True)

    def test_other_settings_are_named(self, tmp_path: Path, prefix: Path) -> None:
        with pytest.raises(UserError, match=r"settings.shuffle_seed was None and is now 3"):
            make(tmp_path / "in", prefix, reuse=True, shuffle_seed=3)

    def test_a_corpus_that_was_read_by_other_rules_is_made_again(self, tmp_path: Path, prefix: Path) -> None:
        record = output_paths(prefix)["json"]
        content = json.loads(record.read_text())
        del content["reading_rules"]  # as before content decided how files are read
        record.write_text(json.dumps(content))
        with pytest.raises(UserError, match="cannot be reused: reading_rules was None and is now"):
            make(tmp_path / "in", prefix, reuse=True)
        assert not make(tmp_path / "in", prefix, reuse=True, overwrite=True).reused

    def test_the_number_of_processes_does_not_matter(self, tmp_path: Path, prefix: Path) -> None:
        assert make(tmp_path / "in", prefix, reuse=True, workers=2).reused

    @pytest.mark.parametrize("suffix", ["bin", "idx", "json"])
    def test_a_missing_or_cut_file_is_noticed(self, tmp_path: Path, prefix: Path, suffix: str) -> None:
        path = output_paths(prefix)[suffix]
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(UserError, match=rf"corpus\.{suffix}(: is there already| has \d+ bytes, not \d+)"):
            make(tmp_path / "in", prefix, reuse=True)
        path.unlink()
        with pytest.raises(UserError, match="cannot be reused"):
            make(tmp_path / "in", prefix, reuse=True)
        make(tmp_path / "in", prefix, reuse=True, overwrite=True)
        assert read_texts(prefix) == ["one"]
