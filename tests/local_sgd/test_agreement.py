# SPDX-License-Identifier: Apache-2.0
"""What ranks compare before anything depends on it, and what is said of differences."""

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch

from megatron_ext.config_options import flag_of
from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
from megatron_ext.local_sgd.agreement import (
    MAY_DIFFER,
    canonical,
    differences,
    numbers_in_words,
    settings_of,
    workers_in_words,
)

CONFIGS = (LocalSGDConfig, OuterOptimizerConfig, GTAConfig, StreamingConfig)
FIELDS = [(config, entry.name) for config in CONFIGS for entry in dataclasses.fields(config)]


def settings(**changed):
    """Return what is compared, with some fields of some config changed."""
    given = [
        config(**{name: value for name, value in changed.items() if name in config.__dataclass_fields__})
        for config in CONFIGS
    ]
    return settings_of(*given)


def another(config, name):
    """Return a value of a field that is not its default, made of its annotation."""
    default, hint = getattr(config(), name), get_type_hints(config)[name]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    choices = [choice for kind in [hint, *kinds] for choice in get_args(kind) if isinstance(choice, str)]
    if choices:
        return next(choice for choice in choices if choice != default)
    if name == "outer_optim_class":
        return torch.optim.RMSprop
    if isinstance(default, dict):
        return {"lr": 0.25}
    made = {bool: lambda: not default, int: lambda: (default or 0) + 3, float: lambda: (default or 0.0) + 0.125}
    return next((made[kind]() for kind in kinds if kind in made), "another")


@pytest.mark.parametrize(("config", "name"), FIELDS, ids=[name for _, name in FIELDS])
def test_every_field_is_compared_unless_it_is_named_as_one_that_may_differ(config, name):
    flag, found = flag_of(config.__dataclass_fields__[name]), differences(
        [settings(), settings(**{name: another(config, name)}), settings()], workers_in_words
    )
    if name in MAY_DIFFER:
        assert found == []
    else:
        assert [line.split(" is ")[0] for line in found] == [flag]
        assert "on workers 0, 2 and " in found[0] and "on worker 1; give all of them the same" in found[0]


def test_what_may_differ_is_a_field_with_a_reason():
    assert set(MAY_DIFFER) <= {name for _, name in FIELDS}
    assert all(len(reason.split()) > 3 for reason in MAY_DIFFER.values())


def test_a_class_and_its_import_path_are_the_same_setting():
    by_class, by_path = (settings(outer_optim_class=which) for which in (torch.optim.Adam, "torch.optim.Adam"))
    assert by_class == by_path


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (0.1, torch.tensor(0.1, dtype=torch.float64).item()),
        ({"a": 1, "b": (0.9, 0.99)}, {"b": [0.9, 0.99], "a": 1.0}),
        (lambda: None, lambda: None),
    ],
    ids=["numbers", "floats", "dictionaries", "functions"],
)
def test_what_means_the_same_has_the_same_words(left, right):
    if callable(left):
        right = type(left)(left.__code__, left.__globals__, left.__name__)
        right.__qualname__ = left.__qualname__
        assert left is not right
    assert canonical(left) == canonical(right)


@pytest.mark.parametrize(("left", "right"), [(True, 1), ("1", 1), (None, "None"), (0.1, 0.1 + 2e-17)])
def test_what_means_something_else_has_other_words(left, right):
    assert canonical(left) != canonical(right)


def test_ranges_of_ranks_are_short():
    assert numbers_in_words(range(64)) == "0-63"
    assert numbers_in_words([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7, 8"


def test_ranks_of_a_worker_are_named_where_they_differ_among_themselves():
    assert workers_in_words([0, 1, 4, 5], shards=2) == "workers 0, 2"
    assert workers_in_words([1, 2], shards=2) == "rank 1 of worker 0, rank 0 of worker 1"
