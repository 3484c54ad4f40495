# SPDX-License-Identifier: Apache-2.0
"""Which files belong to a corpus."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.discover import find_sources
from megatron_ext.data.output import write_sidecar
from megatron_ext.errors import UserError
from tests.support.corpus import unhurried


def tree(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def names(*inputs: Path, **settings: object) -> list[str]:
    return [source.name for source in find_sources(inputs, **settings).files]


def test_the_description_of_a_corpus_is_not_text(tmp_path: Path) -> None:
    for name in ("corpus.bin", "corpus.idx", "other.json"):
        (tmp_path / name).write_text("{}")
    write_sidecar(tmp_path / "corpus.json", {"inputs": ["x" * 10_000]})
    inventory = find_sources([tmp_path], globs=["*.json"])
    assert [source.name for source in inventory.files] == ["other.json"]
    assert inventory.skipped["description of another corpus"] == 1


@pytest.mark.parametrize("content", ['{"text": "a"}\n' * 9, '{"format": "other"}', "[" * 200_000, ""])
def test_data_named_as_a_corpus_beside_it_are_read(tmp_path: Path, content: str) -> None:
    for name in ("wiki.bin", "wiki.idx"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / "wiki.json").write_text(content)
    assert names(tmp_path, globs=["*.json"]) == ["wiki.json"]


def test_all_that_is_left_out_is_named(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", ".hidden/x", "b/.x", "b/c.py", "vendor/d.txt")
    (tmp_path / "z.txt").symlink_to("a.txt")
    inventory = find_sources([tmp_path], globs=["*.txt"], excludes=["vendor"])
    assert sorted(str(file) for file in inventory.left_out) == [
        f"{tmp_path}/.hidden: hidden",
        f"{tmp_path}/b/.x: hidden",
        f"{tmp_path}/b/c.py: not matching --glob",
        f"{tmp_path}/vendor: excluded",
        f"{tmp_path}/z.txt: file already read under another name",
    ]


def test_a_pattern_that_begins_with_a_slash_is_one_at_the_top(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "b/a.txt", "b/c.txt")
    assert names(tmp_path, excludes=["/a.txt"]) == ["b/a.txt", "b/c.txt"]
    assert names(tmp_path, globs=["/b/*"]) == ["b/a.txt", "b/c.txt"]


def test_order_is_by_bytes_of_the_relative_path_whatever_the_file_system_says(tmp_path: Path) -> None:
    tree(tmp_path, "b/z", "a.txt", "a/y", "a/b/x", "B", "a-c", "\u00e9")
    assert names(tmp_path) == ["B", "a-c", "a.txt", "a/b/x", "a/y", "b/z", "\u00e9"]


def test_inputs_keep_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    tree(tmp_path, "b/1", "a/2", "c.txt")
    assert names(tmp_path / "c.txt", tmp_path / "b", tmp_path / "a") == ["c.txt", "1", "2"]


def test_hidden_files_and_folders_are_left_out_and_counted(tmp_path: Path) -> None:
    tree(tmp_path, "seen", ".hidden", ".git/config", "a/.x")
    inventory = find_sources([tmp_path])
    assert [source.name for source in inventory.files] == ["seen"]
    assert inventory.skipped == {"hidden": 3}


def test_a_hidden_input_that_is_named_itself_is_read(tmp_path: Path) -> None:
    tree(tmp_path, ".data/a", ".notes")
    assert names(tmp_path / ".data", tmp_path / ".notes") == ["a", ".notes"]


def test_globs_choose_by_name_or_by_path_and_excludes_cut_whole_folders(tmp_path: Path) -> None:
    tree(tmp_path, "a.py", "b.txt", "pkg/c.py", "pkg/d.md", "vendor/e.py", "pkg/gen/f.py")
    assert names(tmp_path, globs=["*.py"]) == ["a.py", "pkg/c.py", "pkg/gen/f.py", "vendor/e.py"]
    assert names(tmp_path, globs=["*.md", "b.*"]) == ["b.txt", "pkg/d.md"]
    assert names(tmp_path, globs=["pkg/*.py"]) == ["pkg/c.py", "pkg/gen/f.py"]
    assert names(tmp_path, globs=["**/*.py"]) == ["a.py", "pkg/c.py", "pkg/gen/f.py", "vendor/e.py"]
    assert names(tmp_path, globs=["pkg/**/[cf].py"]) == ["pkg/c.py", "pkg/gen/f.py"]
    inventory = find_sources([tmp_path], globs=["*.py"], excludes=["vendor", "pkg/gen"])
    assert [source.name for source in inventory.files] == ["a.py", "pkg/c.py"]
    assert inventory.skipped == {"excluded": 2, "not matching --glob": 2}


def test_a_named_file_is_taken_whatever_the_patterns(tmp_path: Path) -> None:
    tree(tmp_path, "notes.md")
    (source,) = find_sources([tmp_path / "notes.md"], globs=["*.py"], excludes=["*.md"]).files
    assert source.named


def test_links_to_files_are_followed_and_a_loop_of_folder_links_ends(tmp_path: Path) -> None:
    tree(tmp_path, "data/a", "data/sub/b", "elsewhere/c")
    (tmp_path / "data/sub/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/self").symlink_to(".")
    (tmp_path / "data/other").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/file").symlink_to(tmp_path / "elsewhere/c")
    inventory = find_sources([tmp_path / "data"])
    assert [source.name for source in inventory.files] == ["a", "file", "sub/b"]
    assert inventory.skipped == {
        "folder already read through another link": 2,
        "file already read under another name": 1,
    }


def test_a_file_with_several_names_is_taken_once_under_the_one_that_tells_its_format(tmp_path: Path) -> None:
    tree(tmp_path, "cache/blobs/1f", "cache/blobs/2e", "more/x.txt")
    snapshot = tmp_path / "cache/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "a.jsonl").symlink_to(tmp_path / "cache/blobs/1f")
    (snapshot / "b.parquet").symlink_to("../../blobs/2e")
    (tmp_path / "more/cache").symlink_to(tmp_path / "cache")
    (tmp_path / "more/y.txt").symlink_to("x.txt")
    inventory = find_sources([tmp_path / "cache", tmp_path / "more"])
    assert [source.name for source in inventory.files] == [
        "snapshots/main/a.jsonl", "snapshots/main/b.parquet", "x.txt",
    ]  # fmt: skip
    assert inventory.skipped == {"file already read under another name": 7}


def test_files_of_equal_content_are_all_taken(tmp_path: Path) -> None:
    tree(tmp_path, "a")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


def test_a_link_that_leads_nowhere_is_a_problem_unless_it_was_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / ".lock").symlink_to(tmp_path / "nothing")
    (problem,) = find_sources([tmp_path]).problems
    assert str(problem) == f"{tmp_path / 'gone.txt'}: cannot read: No such file or directory"
    assert find_sources([tmp_path], globs=["*.py"]).problems == []


def test_devices_pipes_and_sockets_are_counted_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        inventory = find_sources([tmp_path])
    assert inventory.files == []
    assert inventory.skipped == {"device, pipe or socket": 2}
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        find_sources([tmp_path / "pipe"])


def test_a_missing_input_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: No such file or directory; check the path"):
        find_sources([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("d/*.jsonl", "d --glob '*.jsonl'"),
        ("d/x/part-?.txt", "d/x --glob 'part-?.txt'"),
        ("d/*/[ab].txt", "d --glob '/*/[ab].txt'"),
        ("*.jsonl", ". --glob '*.jsonl'"),
        ("/d/*", "/d --glob '*'"),
    ],
)
def test_a_pattern_that_no_shell_has_expanded_is_told_the_option_for_it(pattern: str, advice: str) -> None:
    with pytest.raises(UserError) as refusal:
        find_sources([Path(pattern)])
    said = f"input {pattern}: No such file or directory; no file has such a name; of a folder's files --glob chooses: "
    assert str(refusal.value) == said + advice


@pytest.mark.parametrize("second", ["data", "data/sub", "data/sub/../sub/x"])
def test_an_input_inside_another_one_is_refused(tmp_path: Path, second: str) -> None:
    tree(tmp_path, "data/sub/x")
    with pytest.raises(UserError, match="is given twice"):
        find_sources([tmp_path / "data", tmp_path / second])


def test_own_outputs_inside_the_input_folder_are_not_read_back(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt", "corpus.json", "deeper/corpus.json", "corpus/cache/GPTDataset_indices/d.txt")
    own = frozenset({tmp_path / "corpus.json", tmp_path / "corpus/cache/GPTDataset_indices"})
    inventory = find_sources([tmp_path], own_outputs=own)
    assert [source.name for source in inventory.files] == ["a.txt", "deeper/corpus.json"]
    assert inventory.skipped == {"output of this command": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "jsonl"), ("A.JSONL.GZ", "jsonl"), ("a.ndjson", "jsonl"), ("a.parquet", "parquet"),
        ("a.py", "text"), ("README", "text"), ("a.json", "json"), ("jsonl", "text"),
    ],
)  # fmt: skip
def test_format_goes_by_the_suffix_unless_it_is_given(tmp_path: Path, name: str, expected: str) -> None:
    tree(tmp_path, name)
    assert [source.format for source in find_sources([tmp_path]).files] == [expected]
    assert [source.format for source in find_sources([tmp_path], file_format="text").files] == ["text"]


def test_digest_follows_content_changes_and_names_but_not_the_place_of_the_folder(tmp_path: Path) -> None:
    folder = tree(tmp_path / "one", "a", "b")
    digest = find_sources([folder]).digest()
    assert find_sources([folder]).digest() == digest

    moved = tmp_path / "two"
    folder.rename(moved)
    assert find_sources([moved]).digest() == digest

    times = (moved / "a").stat()
    (moved / "a").write_text("longer than before")
    os.utime(moved / "a", ns=(times.st_atime_ns, times.st_mtime_ns))
    grown = find_sources([moved]).digest()
    assert grown != digest
    os.utime(moved / "a", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    touched = find_sources([moved]).digest()
    assert touched != grown
    (moved / "b").rename(moved / "c")
    assert find_sources([moved]).digest() != touched


@unhurried
@given(st.lists(st.text(alphabet="ab/.", min_size=1, max_size=6), max_size=6))
def test_every_regular_file_is_either_listed_or_counted(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    for path in paths:
        target = Path(os.path.normpath(root / path.lstrip("/")))
        if target.is_relative_to(root) and not target.exists():
            try:
                tree(target.parent, target.name)
            except (FileExistsError, NotADirectoryError):
                continue  # a file stands where this path wants a folder
    visible = sorted(
        (
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
        ),
        key=os.fsencode,
    )
    assert names(root) == visible
