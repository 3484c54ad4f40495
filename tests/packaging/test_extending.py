# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md names every event and protocol, with the patches that serve it, and the example as it is."""

import inspect
import re
from pathlib import Path

from megatron_ext.hooks import Event, Feature
from megatron_ext.hooks.concerns import CONCERNS

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLE = REPOSITORY / "examples" / "extension"


def rows(heading: str) -> list[tuple[str, str, str]]:
    """Return the rows of the table of three columns under a heading."""
    body = TEXT[TEXT.index(f"### {heading}") :].split("\n### ", 2)[0]
    return re.findall(r"^\| `(\w+)` \| (.+?) \|(.*?)\|$", body, re.MULTILINE)


def patches_of(kind: type) -> str:
    found = re.findall(r"[Bb]y `seams\.(\w+\.\w+\(\))`", kind.__doc__ or "")
    return ", ".join(f"`{patches}`" for patches in found)


def test_every_event_is_in_the_table_in_its_order_with_the_patches_that_raise_it():
    wanted = [(kind.__name__, patches_of(kind)) for kind in Event.__subclasses__()]
    assert len(wanted) == 15
    assert [(name, patches.strip()) for name, _, patches in rows("Events")] == wanted


def test_every_protocol_is_in_the_table_with_its_methods_and_patches():
    wanted = {}
    for kind in CONCERNS:
        methods = [name for name, value in vars(kind).items() if getattr(value, "__isabstractmethod__", False)]
        wanted[kind.__name__] = (methods, patches_of(kind))
    listed = rows("Concerns that only some features have")
    assert {
        name: (re.findall(r"`(\w+)`", said.split(":")[0]), patches.strip()) for name, said, patches in listed
    } == wanted


def test_every_question_of_a_feature_is_in_the_table():
    named = re.findall(r"^\| `(\w+)(?:\(.*\))?` \|", TEXT[: TEXT.index("### Events")], re.MULTILINE)
    assert named == ["name", *(name for name, _ in sorted(inspect.getmembers(Feature, inspect.isfunction), key=line))]


def line(member: tuple[str, object]) -> int:
    return inspect.getsourcelines(member[1])[1]


def test_what_is_quoted_of_the_example_is_there():
    entry = 'parameter-norm = "megatron_ext_example.parameter_norm:ParameterNorm"'
    assert entry in TEXT and entry in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    source = (EXAMPLE / "megatron_ext_example" / "parameter_norm.py").read_text(encoding="utf-8")
    assert f"a whole one in {len(source.splitlines())} lines" in TEXT and "--parameter-norm-interval" in source
