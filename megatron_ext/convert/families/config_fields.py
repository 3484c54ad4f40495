# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face configuration whose fields are all accounted for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

from megatron_ext.errors import UserError

__all__ = ["ConfigFields", "carried_fields", "is_whole"]

_OF_THE_FILE: Mapping[str, str] = MappingProxyType(
    {
        "architectures": "a class with other tensors is found by its tensors",
        "auto_map": "code beside the weights, of which the family is a copy in transformers",
        "dtype": "the weights have their types themselves",
        "model_type": "it has chosen the family",
        "torch_dtype": "the former name of dtype",
        "transformers_version": "what wrote it",
        "_name_or_path": "where it was",
        "num_nextn_predict_layers": "the weights say whether there are any, and --mtp asks for it",
    }
)
"""Fields that are of a file and its weights, so that another file has its own; and why they are not read."""

_OF_THE_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "bos_token_id": "data and tokenizer decide which tokens there are",
        "eos_token_id": "likewise",
        "pad_token_id": "Megatron pads no rows, whose embedding training would have to leave alone",
        "use_cache": "of generation",
        "initializer_range": "of the beginning: every weight is read, and upcycling has --router-std",
    }
)
"""Fields that every family has, with which the function of the weights, and training from them, is the same with any
value; and why."""

_OF_A_FAMILY: Mapping[str, str] = MappingProxyType(
    {
        "ep_size": "of how DeepSeek's own code is spread over GPUs",
        "pretraining_tp": "of the order in which transformers adds up a product",
        "max_window_layers": "counts with use_sliding_window alone, which does not convert",
        "output_router_logits": "of what transformers returns; the balancing loss has a coefficient, which is carried",
    }
)
"""The same of fields that some families have."""

_SAYS_NOTHING = {**_OF_THE_FILE, **_OF_THE_TEXT, **_OF_A_FAMILY}


def carried_fields(former: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the fields of a ``config.json`` that Megatron does not know, and a model made of the first one keeps.

    Args:
        former: the file's content.
        model_type: family of the model that they are for; one of another family has other fields.
    """
    names = {**_OF_THE_TEXT, **_OF_A_FAMILY} if former.get("model_type") == model_type else _OF_THE_TEXT
    return {name: former[name] for name in names if name in former}


_KINDS = {
    bool: "true or false",
    int: "a whole number from 0",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
"""Of values, in words."""


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least so much; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_like(value: Any, default: Any) -> bool:
    """Return whether a value is of the kind of another one."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int):
        return is_whole(value, 0)
    if isinstance(default, float):
        return _is_number(value)
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(item, str | int) for item in value)
    return isinstance(value, type(default))


class ConfigFields:
    """The fields of a ``config.json``, which are taken one by one; what nobody took is an error at the end."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        """Begin with all fields.

        Args:
            config: the file's content.
            family: what errors call the model's family.
        """
        self._left = {name: value for name, value in config.items() if name not in _SAYS_NOTHING}
        self._family = family
        self._problems: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or `default` where the file does not have it (or says null).

        A value of another kind than the default, where there is one, is noted.
        """
        value = self._left.pop(name, default)
        if value is None or default is None:
            return default if value is None else value
        if not _is_like(value, default):
            self._problems.append(f"{name} is {value!r}, not {_KINDS[type(default)]}")
            return default
        return value

    def rename(self, former: str, name: str) -> None:
        """Let a field have the name that another release of transformers gives it, unless that is there."""
        if former in self._left:
            self._left.setdefault(name, self._left.pop(former))
            self._left.pop(former, None)

    def peek(self, name: str, default: Any) -> Any:
        """Return a field's value without taking it, and `default` in place of one of another kind."""
        value = self._left.get(name, default)
        return value if _is_like(value, default) else default

    def need(self, name: str, instead: Any) -> Any:
        """Return a field that has to be there, because families differ in what they mean without it.

        Args:
            name: of the field.
            instead: what is taken where it is missing, which is noted.
        """
        self.must_have(name)
        return self.take(name, instead)

    def size(self, name: str) -> int:
        """Return a field that has to be there, a whole number of at least 1."""
        value = self._left.pop(name, None)
        if not is_whole(value, 1):
            self._problems.append(f"{name} is {value!r}, not a whole number of at least 1")
            return 1
        return value

    def part(self, name: str) -> float:
        """Return a field that is a part of a whole, from 0 to below 1, and 0 where it is missing."""
        value = self.take(name)
        value = 0.0 if value is None else value
        if not _is_number(value) or not 0 <= value < 1:
            self._problems.append(f"{name} is {value!r}, not a number from 0 to below 1")
            return 0.0
        return float(value)

    def table(self, name: str) -> dict[str, Any]:
        """Return a field that has fields of its own; none where it is missing."""
        return dict(self.take(name, {}))

    def positive(self, name: str, value: Any) -> float:
        """Return the value of a field, or of a field in another, that is a number above 0."""
        if not _is_number(value) or value <= 0:
            self._problems.append(f"{name} is {value!r}, not a number above 0")
            return 1.0
        return float(value)

    def must_be(self, name: str, *allowed: Any) -> None:
        """Take a field that converts at some values alone; the first is what a file means that lacks it."""
        value = self._left.pop(name, allowed[0])
        if value not in allowed:
            self._problems.append(f"{name} is {value!r}, and only {' or '.join(map(repr, allowed))} converts")

    def must_have(self, name: str) -> None:
        """Note that a field is missing, without taking it."""
        if name not in self._left:
            self._problems.append(f"{name} is missing; write down what the model was trained with")

    def must_stay(self, name: str, value: Any) -> None:
        """Look at a field that converts at one value alone, without taking it."""
        found = self._left.get(name, value)
        if found != value:
            self._problems.append(f"{name} is {found!r}, and only {value!r} converts")

    def refuse(self, problem: str) -> None:
        """Note that something does not convert."""
        self._problems.append(problem)

    @property
    def problems(self) -> tuple[str, ...]:
        """What has been found not to convert."""
        return tuple(self._problems)

    @property
    def left(self) -> frozenset[str]:
        """Fields that nobody has taken, and that may say something."""
        return frozenset(self._left)

    def finish(self, ignored: Iterable[str]) -> None:
        """Check that every field was taken, and that all convert.

        Args:
            ignored: fields that the user has said to be of no importance.

        Raises:
            UserError: naming all fields that do not convert.
        """
        unknown = sorted(self._left.keys() - set(ignored))
        problems = [
            *self._problems,
            *(f"{name} ({self._left[name]!r}) has no counterpart in Megatron's {self._family}" for name in unknown),
        ]
        if problems:
            raise UserError(
                f"config.json of a {self._family} model: "
                + "; ".join(problems)
                + ("; --ignore NAME says that a field has no meaning for the model" if unknown else "")
            )
