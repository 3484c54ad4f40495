# SPDX-License-Identifier: Apache-2.0
"""What hot switching's package calls public is found at one place, at run time and by type checkers."""

import ast
from pathlib import Path

from megatron_ext import hot_switch


def test_public_names_are_those_that_have_a_place_and_a_type():
    tree = ast.parse(Path(hot_switch.__file__).read_text(encoding="utf-8"))
    (typed,) = (node.body for node in tree.body if isinstance(node, ast.If))
    typed_places = {
        alias.name: node.module for node in typed if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    places = {name: f"{hot_switch.__name__}.{place}" for name, place in hot_switch._PLACES.items()}
    assert typed_places == places
    assert sorted(hot_switch.__all__) == sorted(places)


def test_every_public_name_is_found():
    assert all(getattr(hot_switch, name) is not None for name in hot_switch.__all__)
