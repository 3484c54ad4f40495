# SPDX-License-Identifier: Apache-2.0
"""What docs/architecture.md says is where it says: its walks can be followed line by line, and its rooms exist."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = {
    title.strip(): re.findall(r"^\| `(\S+\.py)` \| `(.+)` \|$", body, re.MULTILINE)
    for title, body in re.findall(r"^### (.+?)\n(.*?)(?=^###? |\Z)", TEXT, re.MULTILINE | re.DOTALL)
}


def test_there_is_a_walk_through_every_feature():
    assert len(WALKS) >= 8
    text = " ".join(WALKS)
    assert all(feature in text for feature in ("local SGD", "EDiT", "between jobs", "SPES", "hot switching"))
    assert all(len(steps) >= 4 for steps in WALKS.values())


@pytest.mark.parametrize("title", WALKS)
def test_every_step_of_a_walk_is_one_line_of_its_file(title: str):
    for file, line in WALKS[title]:
        lines = [found.strip() for found in (REPOSITORY / file).read_text(encoding="utf-8").splitlines()]
        assert lines.count(line.replace("\\|", "|")) == 1, f"{file}: {line}"


def test_every_room_that_is_named_is_there():
    rooms = re.findall(r"^\| (`.+?) \| (.+) \|$", TEXT[: TEXT.index("## Walks")], re.MULTILINE)
    assert len(rooms) >= 7
    for names, said in rooms:
        first = re.findall(r"`([\w./]+)`", names)
        for name in first:
            assert (REPOSITORY / "megatron_ext" / name).exists(), name
        for inner in re.findall(r"`(\w+/)`", said):
            assert (REPOSITORY / "megatron_ext" / first[0] / inner).is_dir(), inner
