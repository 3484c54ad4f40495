# SPDX-License-Identifier: Apache-2.0
"""Config fields as command-line options."""

import argparse
from dataclasses import Field, field
from typing import Any, Self

__all__ = ["WITHOUT_FLAG", "FromArgs", "argument_of", "flag", "flag_of", "on_off"]

WITHOUT_FLAG = "without_flag"
"""Key of a field's metadata: what it holds cannot be given on a command line."""


def flag(name: str, default: Any, **argparse_meta: Any) -> Any:
    """Return a field whose command-line flag is not simply its name."""
    # Megatron's namespace is flat, and a bare `normalize` or `density` would be anybody's.
    named = {"arg_names": [name], "dest": _argument(name)}
    return field(default=default, metadata={"argparse_meta": {**named, **argparse_meta}})


def on_off(name: str, default: bool) -> Any:
    """Return a field whose flag has a `--no-` form."""
    return flag(name, default, action=argparse.BooleanOptionalAction)


def flag_of(entry: "Field[Any]") -> str:
    """Return the command-line flag of a config field."""
    meta = entry.metadata.get("argparse_meta", {})
    return str(meta["arg_names"][0]) if "arg_names" in meta else "--" + entry.name.replace("_", "-")


def argument_of(entry: "Field[Any]") -> str:
    """Return what a config field is called in Megatron's argument namespace."""
    return _argument(flag_of(entry))


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


class FromArgs:
    """A config whose fields are Megatron arguments."""

    @classmethod
    def from_args(cls, args: Any) -> Self:
        """Read the fields from Megatron's argument namespace."""
        fields: dict[str, Field[Any]] = getattr(cls, "__dataclass_fields__")  # noqa: B009  # every subclass is one
        return cls(
            **{
                name: getattr(args, argument_of(entry))
                for name, entry in fields.items()
                if not entry.metadata.get(WITHOUT_FLAG)
            }
        )

    def by_flag(self) -> dict[str, Any]:
        """Return the values by their command-line flags."""
        fields: dict[str, Field[Any]] = getattr(self, "__dataclass_fields__")  # noqa: B009  # every subclass is one
        return {
            flag_of(entry): getattr(self, name)
            for name, entry in fields.items()
            if not entry.metadata.get(WITHOUT_FLAG)
        }
