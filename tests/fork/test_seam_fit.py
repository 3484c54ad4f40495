# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext patches --fork` finds the seams in a fork's source, and names what differs, without importing it."""

import json
from pathlib import Path

import megatron.core
import pytest

from megatron_ext.activation import known_patches
from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.fork.seam_fit import fit, seams_of_megatron
from megatron_ext.fork.source import Definition, ForkSource, Missing
from megatron_ext.patching import Patch

INSTALLED = Path(megatron.core.__path__[0]).parents[1]

FILES = {
    "core/package_info.py": "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = 'rc2'\nraise SystemExit('imported')\n",
    "core/__init__.py": """
from megatron.core import parallel_state
from .tools import *
from .tools import loop as again
""",
    "core/parallel_state.py": "",
    "core/tools.py": "from .other import loop\n\ndef wide(a, /, b, *rest, c=1, **more): pass\n",
    "core/other.py": "from .tools import loop\n",
    "core/optimizer.py": """
try:
    from apex import Adam
except ImportError:
    Adam = None
if Adam:
    def chosen(first): pass
else:
    def chosen(second): pass

class Base:
    def step(self, closure): pass

class Own(Base):
    @staticmethod
    def make(size): pass
""",
    "training/moved.py": "def train_step(data): pass\n",
    "training/damaged.py": "def (\n",
}


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def patch(target: str, *parameters: str, missing_from: str = "") -> Patch:
    return Patch(
        name="test/one", target=target, wrap=len, reason="tested", parameters=parameters, missing_from=missing_from
    )


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("megatron.core.tools:wide", ("megatron.core.tools", "wide", ("a", "b", "rest", "c", "more"))),
        ("megatron.core:wide", ("megatron.core.tools", "wide", ("a", "b", "rest", "c", "more"))),
        ("megatron.core:parallel_state", ("megatron.core", "parallel_state", None)),
        ("megatron.core.optimizer:chosen", ("megatron.core.optimizer", "chosen", ("second",))),
        ("megatron.core.optimizer:Adam", ("megatron.core.optimizer", "Adam", None)),
        ("megatron.core.optimizer:Own.step", ("megatron.core.optimizer", "Base.step", ("self", "closure"))),
        ("megatron.core.optimizer:Own.make", ("megatron.core.optimizer", "Own.make", ("size",))),
    ],
)
def test_a_target_is_found_where_it_is_defined_through_imports_bases_and_conditions(fork, target, found):
    place = ForkSource(fork).find(*target.split(":"))
    assert isinstance(place, Definition)
    assert (place.module, place.attribute, place.parameters) == found


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("megatron.core.gone:x", "there is no module megatron.core.gone"),
        ("megatron.core.tools:gone", "megatron.core.tools has no gone"),
        ("megatron.core.optimizer:Own.gone", "Own in megatron.core.optimizer has no gone"),
    ],
)
def test_a_target_that_is_not_there_is_said_to_be_missing(fork, target, said):
    assert ForkSource(fork).find(*target.split(":")) == Missing(said)


def test_imports_in_a_circle_come_to_an_end(fork):
    source = ForkSource(fork)
    assert isinstance(source.find("megatron.core.tools", "loop"), Definition)
    assert isinstance(source.find("megatron.core", "again"), Definition)


def test_each_seam_gets_a_status_and_what_differs(fork):
    fits = fit(
        ForkSource(fork),
        [
            patch("megatron.core.tools:wide", "a", "c"),
            patch("megatron.core.tools:wide", "a", "colour"),
            patch("megatron.training.training:train_step"),
            patch("megatron.training.training:train_step", missing_from="<0.17"),
        ],
    )
    assert [entry.status for entry in fits] == ["fits", "differs", "missing", "unavailable"]
    assert fits[1].problem == "no parameter colour (it has a, b, rest, c, more)"
    assert fits[2].elsewhere == (Path("megatron/training/moved.py"),)
    assert (fits[0].file, fits[0].line) == (Path("megatron/core/tools.py"), 3)


def test_every_seam_fits_the_installed_megatron_as_its_import_says():
    patches = seams_of_megatron(known_patches())
    assert len(patches) > 60
    problems = {entry.patch.name: entry.problem for entry in fit(ForkSource(INSTALLED), patches) if entry.problem}
    known = {one.name for one in patches if one.missing_from}
    assert problems.keys() <= known


def test_the_command_reads_a_fork_of_an_old_release(fork, capsys):
    assert main(["patches", "--fork", str(fork)]) == 0
    output = capsys.readouterr().out
    assert "something of that name: megatron/training/moved.py" in output
    assert f"Megatron 0.16.1rc2 in {fork}: 0 of " in output
    assert "local-sgd: 0 of " in output
    assert "patch_megatron() refuses this release: tested are >=0.18" in output
    assert main(["patches", "--fork", str(fork), "--check", "--json"]) == 1
    entries = json.loads(capsys.readouterr().out)
    step = next(entry for entry in entries if entry["name"] == "training/step")
    assert (step["status"], step["elsewhere"]) == ("missing", ["megatron/training/moved.py"])


def test_what_cannot_be_read_is_one_error_that_names_the_file(fork, capsys):
    assert main(["patches", "--fork", str(fork / "megatron")]) == 2
    assert "there is no megatron/core/package_info.py; give the folder that holds" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"damaged\.py is not Python that this interpreter reads"):
        ForkSource(fork).find("megatron.training.damaged", "x")
    (fork / "megatron/core/package_info.py").write_text("MAJOR = 0\n")
    with pytest.raises(UserError, match="does not say Megatron's version as MAJOR, MINOR and PATCH"):
        _ = ForkSource(fork).version
