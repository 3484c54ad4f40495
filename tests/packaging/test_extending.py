# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md names every event and protocol, with the patches that serve it, and the example as it is."""

import inspect
import re
from pathlib import Path

from megatron_ext.hooks import Event, Feature
from megatron_ext.hooks.concerns import CONCERNS
from megatron_ext.outer.codecs.all_codecs import CODECS, lossy_codecs
from megatron_ext.outer.optimizers.all_optimizers import OPTIMIZERS
from megatron_ext.outer.places import Where
from megatron_ext.outer.reducers.all_reducers import REDUCERS

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
    assert len(wanted) == 16
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


def test_every_registry_is_in_the_table_with_its_group_and_every_place_is_named():
    table = TEXT[TEXT.index("## A reducer, a codec") :].split("\n\n")[2]
    groups = re.findall(r"^\| (reducer|codec|outer optimizer) \|.*\| `([\w.]+)` \|$", table, re.MULTILINE)
    assert [group for _, group in groups] == [registry.group for registry in (REDUCERS, CODECS, OPTIMIZERS)]
    said = re.search(r"The places are (.+?), in \[places", TEXT)
    assert said is not None and re.findall(r"`(\w+)`", said[1]) == [place.name for place in Where]


def test_the_example_package_has_an_entry_for_each_file_that_the_page_names():
    project = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"examples/extension/megatron_ext_example/(\w+)\.py", TEXT)
    assert sorted(set(named)) == ["coordinate_median", "fp24", "parameter_norm"]
    assert all(f'"megatron_ext_example.{name}:' in project for name in named)
    assert 'median = "megatron_ext_example.coordinate_median:CoordinateMedian"' in project
    assert "    median = " in TEXT


def lines_with(page: str, beginning: str) -> str:
    """Return the first line of a page with a beginning."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith(beginning))


def test_pages_list_the_names_of_the_registries():
    flag = lines_with("README.md", "`--local-sgd-codec ")
    assert flag.split("`")[1].split()[1].split("|") == list(lossy_codecs())
    assert re.findall(r"`([a-z0-9]+)`", lines_with("docs/sync-service-reference.md", "| `--sync-service-codec`")) == [
        "fp32",
        *CODECS.own_names,
    ]
    page = (REPOSITORY / "docs" / "local-sgd.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.split("| codec |")[1].split("\n\n")[0].splitlines()[2:]]
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(lossy_codecs())
    reducers = lines_with("README.md", "| `--local-sgd-pseudo-grad-reducer`")
    assert re.findall(r"`([a-z]+)`", reducers) == list(REDUCERS.own_names)
    assert all(f"`{name}`" in lines_with("README.md", "| `--outer-optimizer`") for name in OPTIMIZERS.own_names)
