# SPDX-License-Identifier: Apache-2.0
"""The repository speaks the field's language: phrases that a native reader would stop at stay out of code and docs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

WORDS = {
    r"\b(go|goes|going|went|gone) on\b": "resume, continue: what a run does after a stop, and without one",
    r"\bon (its|their) way\b": "in flight: of messages and rounds",
    r"\bbroken\b": "non-finite for values, damaged for files, interrupted for connections",
    r"\b(owe|owes|owed|owing)\b": "residual: what a lossy codec keeps for the next message",
    r"\bnot finite\b": "non-finite: one word for one thing",
    r"\b(ability|abilities)\b": "feature: the code's own word",
    r"\b(mend|mends|mended|mending)\b": "repair, fix",
    r"\banew\b": "again, from scratch, fresh",
    r"\bfor ever\b": "forever",
    r"\bbut for\b": "except for",
    r"\bastray\b": "diverged",
    r"\bshall\b": "should, must",
    r"\b(is|are|was|were|be) had\b": "available",
    r"\b(says?|said|asks?|knows?|say) but\b": "only",
    r"\bknows? nothing\b": "does not know",
    r"\b(in|out of) the open\b(?! \w)": "unencrypted",
    r"\b(a|after every|a further|every|without a) word of\b": "heartbeat: how a peer says that it is alive",
    r"return what is wrong\b": "return the problems: a docstring names what is returned",
    r"(?<!there )(?<!where )\b(is|was|were) no (?!longer|more\b|less\b|one\b|such\b)": "is not a: the plain negation",
    r"\bso many\b(?! (of|that|as)\b)": "this many, that many",
}
"""By regular expression, in lower case and with one blank between words: what to write, and why."""

KEPT = {
    '"broken"': "a key of saved rounds; the status of a patch in `patches --json`",
    "`broken`": "that status, where it is explained",
    '"on_its_way"': "a key of saved rounds",
    '"ability"': "a key of `megatron-ext doctor --json`",
    "`ability`": "that key, where it is explained",
}
"""What programs of others read stays as it is."""

_FOLDERS = ("benchmarks", "configs", "docs", "examples", "megatron_ext", "patches", "scripts", "tests")
_KINDS = {".md", ".proto", ".py", ".sh", ".txt", ".yaml"}


def files() -> list[Path]:
    found = [path for folder in _FOLDERS for path in sorted((REPOSITORY / folder).rglob("*")) if path.suffix in _KINDS]
    found += [REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")]
    generated = re.compile(r"_pb2\.py$|/_build/|/__pycache__/")
    return [path for path in found if path != Path(__file__) and not generated.search(str(path))]


def plain(text: str) -> str:
    """Return a text as its phrases are read: lower case, one blank between words, also in names and across lines."""
    for kept in KEPT:
        text = text.replace(kept, "")
    # The next line may begin with a comment's mark, or with the next piece of a string.
    text = re.sub(r'"?[ \t]*\n[ \t]*(#+ |//+ |f?")?', " ", text)
    return re.sub(r"[\s_]+", " ", text).lower()


def stumbles(text: str) -> Iterator[str]:
    """Yield the phrases of a text that stay out, each with its surroundings and what to write."""
    read = plain(text)
    for pattern, instead in WORDS.items():
        for found in re.finditer(pattern, read):
            yield f"{read[max(found.start() - 30, 0) : found.end() + 20]!r}: {instead}"


def test_no_phrase_is_left_that_a_reader_stops_at():
    sources = files()
    assert len(sources) > 700
    found = []
    for path in sources:
        name = path.relative_to(REPOSITORY)
        found += [f"{name}: {phrase}" for phrase in stumbles(path.read_text(encoding="utf-8"))]
    assert not found, f"{len(found)} phrases:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the run goes on",
        "def go_on_after(self):",
        'raise UserError("a round is on "\n    "its way")',
        "    # the peer\n    # owes a residual",
        "# which is no\n# multiple of it",
        "broken = values[0]",
        "Return what is wrong, one sentence each.",
    ],
)
def test_a_phrase_is_found_in_names_and_across_lines(text: str):
    assert len(list(stumbles(text))) == 1


@pytest.mark.parametrize("text", ['state["broken"]', "there is no file", "it is no longer open", "so many that"])
def test_plain_english_passes(text: str):
    assert list(stumbles(text)) == []
