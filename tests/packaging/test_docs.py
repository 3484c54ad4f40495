# SPDX-License-Identifier: Apache-2.0
"""The pages lead where they say: files and headings exist, and messages that are quoted are the code's."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md", "patches/README.md")),
]
LONGEST = 2500
"""Words of a page about the sync service."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and those it gives itself."""
    text = without_code(page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings} | set(
        re.findall(r'<a id="([\w-]+)">', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_links_of_earlier_releases_to_the_sync_service_find_their_subject():
    former = (
        "a-round rounds-that-overlap-with-training asynchronous-rounds merging-experts guards megatron-jobs-as-peers "
        "promises-each-with-a-test the-status-page several-servers-shards commands files-on-the-server "
        "a-journal-that-has-lost-lines when-something-goes-wrong what-is-not-there-yet"
    )
    assert set(former.split()) <= anchors(REPOSITORY / "docs" / "sync-service.md")


def test_no_page_about_the_sync_service_is_too_long_to_read():
    pages = list((REPOSITORY / "docs").glob("sync-service*.md"))
    assert len(pages) >= 4
    assert {page.name: words for page in pages if (words := len(page.read_text().split())) > LONGEST} == {}


def test_quoted_error_messages_are_the_codes():
    text = (REPOSITORY / "docs" / "sync-service-reference.md").read_text(encoding="utf-8")
    section = text[text.index("## Error messages") : text.index("## Not supported yet")]
    quoted = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert len(quoted) >= 8
    code = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "megatron_ext").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    for message in quoted:
        pieces = [re.escape(piece.strip()) for piece in message.split("...")]
        pattern = r"\s?\{[^{}]*\}\s?".join(pieces)
        assert re.search(pattern, code), message


def test_the_table_of_contents_has_every_page_once():
    text = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    listed = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")} - {"index"}
    assert sorted(listed) == sorted(pages)
