# SPDX-License-Identifier: Apache-2.0
"""JSON from elsewhere is typed or refused with the field's name, whatever it is."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.field_checks import Malformed, check_count, check_name, check_number, check_text
from megatron_ext.sync_service.protocol.names import path_component
from megatron_ext.sync_service.protocol.refusal import Refusal, as_utf8
from megatron_ext.sync_service.protocol.schema import parse, record
from megatron_ext.sync_service.shards.remote_folder import RemoteFolder
from megatron_ext.sync_service.values.contribution import new_name
from megatron_ext.sync_service.values.spool import Spool


@dataclass(frozen=True)
class Thing:
    """What the tests read."""

    count: int
    """A number."""

    share: float
    """Another number."""

    whose: str
    """A name."""

    note: str
    """Text."""


def thing(content: str | bytes) -> Thing:
    return record(
        parse(content),
        "thing",
        Thing,
        count=partial(check_count, most=9),
        share=partial(check_number, least=0),
        whose=check_name,
        note=partial(check_text, longest=3),
    )


GOOD = '{"count": 1, "share": 2, "whose": "a", "note": "b"}'


def test_what_fits_has_its_types():
    found = thing(GOOD)
    assert found == Thing(1, 2.0, "a", "b") and isinstance(found.share, float)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "it is not JSON (Expecting value"),
        ("{", "it is not JSON ("),
        (b"\xff\xfe", "it is not JSON ("),
        ("[" * 100_000, "it has too many levels"),
        ('{"a":' * 100_000, "it has too many levels"),
        ("NaN", "it has NaN, which is not a JSON number"),
        ("[-Infinity]", "it has -Infinity, which is not a JSON number"),
        ("9" * 100_000, "it has a whole number of 100000 digits"),
        ('{"a": 1, "a": 2}', "it has an object with a key twice"),
        ("5", "thing is 5; it must be an object"),
        ("[" * 900 + "]" * 900, "thing is a list of 1; it must be an object"),
        ('{"share": 1, "whose": "a", "note": ""}', "thing.count is missing"),
        (GOOD.replace('"count"', '"other": 1, "count"'), "thing.'other' is not known; the fields are count, share"),
        (GOOD.replace("1", "1.0"), "thing.count is 1.0; it must be a whole number of 0 to 9"),
        (GOOD.replace("1", "true"), "thing.count is True; it must be a whole number"),
        (GOOD.replace("1", "-1"), "thing.count is -1; it must be a whole number of 0 to 9"),
        (GOOD.replace("1", "99999999999999999999"), "thing.count is 99999999999999999999; it must be"),
        (GOOD.replace("1", '"' + "x" * 9999 + '"'), "thing.count is 'xxx"),
        (GOOD.replace("1", '{"a": 1}'), "thing.count is an object of 1 fields; it must be"),
        (GOOD.replace("2", "1e400"), "thing.share is inf; it must be a finite number of 0 to inf"),
        (GOOD.replace("2", "-1"), "thing.share is -1; it must be a finite number"),
        (GOOD.replace('"a"', '"../a"'), "thing.whose is '../a'; it must be a name"),
        (GOOD.replace('"a"', '""'), "thing.whose is ''; it must be a name"),
        (GOOD.replace('"a"', "7"), "thing.whose is 7; it must be a name"),
        (GOOD.replace('"b"', '"\\ud800"'), "thing.note is '\\ud800'; it must be text of up to 3 letters"),
        (GOOD.replace('"b"', '"abcd"'), "thing.note is 'abcd'; it must be text of up to 3 letters"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_field(content: str | bytes, problem: str):
    with pytest.raises(Malformed) as refused:
        thing(content)
    said = str(refused.value)
    assert problem in said and len(said) < 300 and said.isprintable() and refused.value.reason == "invalid"


HOSTILE_NAMES = ("../pwned", "/pwned", "a/b", "..", ".", "", ".a", "a\0b", "a\nb", "x" * 65, "\u00e4", "a b", "a\\b")


@pytest.mark.parametrize("hostile", HOSTILE_NAMES)
def test_names_are_checked_where_a_path_is_made_whatever_their_origin(tmp_path: Path, hostile: str):
    catalog = Catalog([TensorSpec(name="w", shape=(2,))])
    spool = Spool(tmp_path / "spool")
    for make in (
        lambda: path_component(hostile, "thing"),
        lambda: new_name(hostile),
        lambda: spool.contribution(hostile, 0, catalog, "fp32"),
        lambda: spool.seal(hostile, 0, "instance"),
        lambda: spool.sealed_by(hostile, 0),
    ):
        with pytest.raises(Refusal, match="cannot be the name of a"):
            make()
    with pytest.raises(UserError, match="cannot be the name of a folder"):
        RemoteFolder(f"file://{tmp_path}/store", hostile)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert found <= {"spool", "spool/round-00000000"}


def test_what_others_have_put_into_the_spool_is_left_alone_and_not_asked_for(tmp_path: Path):
    spool = Spool(tmp_path / "spool")
    (tmp_path / "spool" / "round-00000001").mkdir()
    for file in ("p.sealed", "not a peer.sealed"):
        (tmp_path / "spool" / "round-00000001" / file).write_text("i")
    spool.keep(lambda peer, number: spool.sealed_by(peer, number) == "another")
    assert [path.name for path in (tmp_path / "spool" / "round-00000001").iterdir()] == ["not a peer.sealed"]


@pytest.mark.parametrize("said", ['{"since": "x"}', '{"since": 1e99}', "[1]", "{", '{"token": 5}', '{"other": 1}'])
def test_an_owner_that_makes_no_sense_says_nothing(tmp_path: Path, said: str):
    folder = RemoteFolder(f"file://{tmp_path}/store", "run")
    (tmp_path / "store/run/owner.json").write_text(said)
    with pytest.raises(OSError, match="belongs to the server with process id unknown on an unknown host"):
        folder.put_snapshot(tmp_path / "round-00000001.safetensors")


def test_text_that_is_none_in_utf8_can_be_sent():
    assert as_utf8("a\udcff b") == "a\\udcff b"


def test_what_a_refusal_quotes_is_short_and_its_end_is_kept():
    said: Any = str(Refusal("invalid", "this is " + "\u4f60" * 10_000 + "; do that"))
    assert said.startswith("this is ") and said.endswith("; do that") and len(said.encode()) < 2100
    assert str(Refusal("invalid", "half \ud800")) == "half \\ud800"
