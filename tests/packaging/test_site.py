# SPDX-License-Identifier: Apache-2.0
"""The site: built without a warning, and its reference has every flag, key and command that there is."""

import argparse
import dataclasses
import html
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from megatron_ext.cli.main import make_parser
from megatron_ext.config_options import WITHOUT_FLAG, flag_of
from megatron_ext.features import all_features
from tests.packaging.machines import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees")]
    done = subprocess.run([*command, str(DOCS), str(folder / "html")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def text_of(page: Path) -> str:
    """Return what a reader of a page sees, one blank between words."""
    found = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", found[0])).split())


def asked_for(page: str, *, flags: bool) -> set[str]:
    """Return the classes whose fields a page lists, by flag or by key."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```\{config-fields\} (\S+)\n(:flags:\n)?```", text, re.MULTILINE)
    return {name for name, as_flags in found if bool(as_flags) == flags}


def test_every_page_is_in_the_site(site: Path):
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}


def test_every_link_inside_the_site_leads_somewhere(site: Path):
    pages = {page.relative_to(site).as_posix(): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    dead, looked_at = [], 0
    for name, text in pages.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text):
            target, _, anchor = urllib.parse.unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (site / name).parent / target if target else site / name
            path = os.path.relpath(file, site)
            known = anchors.get(path)
            looked_at += 1
            if not file.exists() or (anchor and known is not None and anchor not in known):
                dead.append(f"{name}: {link}")
    assert looked_at > 1000
    assert not dead, dead


def test_the_reference_lists_the_flags_of_every_config_class(site: Path):
    from reference_generator import config_fields

    read = text_of(site / "reference-flags.html")
    classes = asked_for("reference-flags.md", flags=True)
    assert len(classes) >= 8
    for name in classes:
        cls = config_fields.of_name(name)
        told = config_fields.described(cls)
        for entry in dataclasses.fields(cls):
            if not entry.metadata.get(WITHOUT_FLAG):
                assert f"{flag_of(entry)} (" in read
                assert told[entry.name].split("`")[0].split("--")[0].strip()[:40] in read


def test_no_class_whose_fields_become_flags_is_missing(monkeypatch: pytest.MonkeyPatch):
    added: list[str] = []
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for feature in all_features():
        if type(feature).__module__.startswith("megatron_ext."):
            monkeypatch.setattr(
                f"{type(feature).__module__}.add_config_group",
                lambda parser, cls, title: added.append(f"{cls.__module__}.{cls.__name__}"),
            )
            feature.add_arguments(parser)
    assert asked_for("reference-flags.md", flags=True) == set(added)
    others = [option for action in parser._actions for option in action.option_strings]
    text = (DOCS / "reference-flags.md").read_text(encoding="utf-8")
    assert [option for option in others if f"`{option} " not in text] == []


def test_the_reference_has_a_section_for_every_command(site: Path):
    from reference_generator import commands

    read = text_of(site / "reference-commands.html")
    leaves = list(commands.leaves(make_parser()))
    assert len(leaves) >= 15
    for leaf in leaves:
        assert f"{leaf.prog}\N{PILCROW SIGN}" in read
        for action in leaf._actions:
            if action.help != argparse.SUPPRESS:
                assert all(option in read for option in action.option_strings)


def test_a_field_without_a_docstring_is_refused():
    from reference_generator import config_fields

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent:
        steps: int = 1

    with pytest.raises(ValueError, match=r"Silent\.steps has no docstring"):
        config_fields.markdown(Silent, as_flags=False)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("rounds with --use-local-sgd, 2 * H", "rounds with `--use-local-sgd`, 2 \\* H"),
        ("a file `x_y.*` of [A]", "a file `x_y.*` of \\[A\\]"),
        ("--no-a_b: none", "`--no-a_b`: none"),
        ("well-known", "well-known"),
    ],
)
def test_help_texts_keep_their_characters(text: str, markdown: str):
    from reference_generator.prose import as_markdown

    assert as_markdown(text) == markdown
