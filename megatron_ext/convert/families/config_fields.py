# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face configuration whose fields are all accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["ConfigFields"]

_SAYS_NOTHING = frozenset(
    {
        # Of the file, of text generation, and of training: the function of the weights is the same with any.
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "ep_size",
        "initializer_range",
        "max_window_layers",
        "model_type",
        "num_nextn_predict_layers",  # the weights say whether there are any
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)


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
        """Return a field's value, or `default` where the file does not have it (or says null)."""
        value = self._left.pop(name, default)
        return default if value is None else value

    def rename(self, former: str, name: str) -> None:
        """Let a field have the name that another release of transformers gives it, unless that is there."""
        if former in self._left:
            self._left.setdefault(name, self._left.pop(former))
            self._left.pop(former, None)

    def peek(self, name: str, default: Any) -> Any:
        """Return a field's value without taking it."""
        return self._left.get(name, default)

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
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._problems.append(f"{name} is {value!r}, not a whole number of at least 1")
            return 1
        return value

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
