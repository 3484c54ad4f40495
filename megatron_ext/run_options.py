# SPDX-License-Identifier: Apache-2.0
"""The options of a run that has begun, wherever the release of Megatron keeps them: the one place that asks for them.

Up to 0.20 they are in the namespace of parsed arguments. Upstream is making a container of configs their place, which
`get_cfg` returns; what it has counts there, and arguments, ours among them, are the rest. Which of the two a release
has is seen by that function, not by a version. No release with it has been tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["OptionsOfConfig", "all_options", "run_options"]

_OF_OPTIONS = "megatron.training.config"
"""Where configs are declared whose fields are options. Those of models, optimizers and DDP are made from options."""


def run_options() -> Any:
    """Return Megatron's options of this run, and ours, as attributes by the names of the arguments; they may be set.

    Raises:
        UserError: Megatron has a container of configs that nobody here has seen the like of.
    """
    from megatron.training import get_args

    args, get_config = get_args(), _config_reader()
    return args if get_config is None else OptionsOfConfig(get_config(), args)


def all_options(options: Any) -> dict[str, Any]:
    """Return options as `run_options` does by their names, as they are now."""
    return options.by_name() if isinstance(options, OptionsOfConfig) else dict(vars(options))


def _config_reader() -> Callable[[], Any] | None:
    import megatron.training
    from megatron.training import global_vars

    for module in (megatron.training, global_vars):
        found = getattr(module, "get_cfg", None)
        if found is None:
            continue
        needed = [entry.name for entry in inspect.signature(found).parameters.values() if entry.default is entry.empty]
        if needed:
            raise UserError(
                f"this release of Megatron keeps its options where megatron_ext cannot read them ({module.__name__}."
                f"get_cfg needs {', '.join(needed)}); use a release that docs/versions.md names"
            )
        reader: Callable[[], Any] = found
        return reader
    return None


@dataclass(frozen=True)
class _Place:
    """Where an option is in a container of configs."""

    config: Any
    field: str
    is_opposite: bool = False
    """Whether the argument says no to what the field says yes to."""

    def read(self) -> Any:
        value = getattr(self.config, self.field)
        return not value if self.is_opposite else value

    def write(self, value: Any) -> None:
        setattr(self.config, self.field, not value if self.is_opposite else value)


class OptionsOfConfig:
    """Options by the names of arguments, read from a container of configs where it has them.

    A value that is set is set in both places, so that whoever in Megatron still reads the other one sees it.
    """

    def __init__(self, container: Any, args: Any) -> None:
        """Look at both.

        Args:
            container: a dataclass whose fields are configs.
            args: the namespace of parsed arguments.
        """
        vars(self)["_args"] = args
        vars(self)["_places"] = _places(container, vars(args))

    def __getattr__(self, name: str) -> Any:
        """Return an option; called for names that are not attributes of this object."""
        place = vars(self)["_places"].get(name)
        return getattr(vars(self)["_args"], name) if place is None else place.read()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option, in the container and in the arguments."""
        place = vars(self)["_places"].get(name)
        if place is not None:
            place.write(value)
        setattr(vars(self)["_args"], name, value)

    def by_name(self) -> dict[str, Any]:
        """Return all options, as they are now."""
        found = {name: place.read() for name, place in vars(self)["_places"].items()}
        return {**vars(vars(self)["_args"]), **found}


def _places(container: Any, args: Mapping[str, Any]) -> dict[str, _Place]:
    """Return where the options are that a container has, by the names of their arguments."""
    found: dict[str, _Place] = {}
    for section in fields(container):
        config = getattr(container, section.name)
        if not is_dataclass(config) or not type(config).__module__.startswith(_OF_OPTIONS):
            continue
        for entry in fields(config):
            name = entry.metadata.get("argparse_meta", {}).get("dest", entry.name)
            if name in args:
                found.setdefault(name, _Place(config, entry.name))
            elif f"no_{entry.name}" in args and isinstance(getattr(config, entry.name), bool):
                found[f"no_{entry.name}"] = _Place(config, entry.name, is_opposite=True)
            else:
                # An option that a release has in its container alone.
                found.setdefault(name, _Place(config, entry.name))
    return found
