# SPDX-License-Identifier: Apache-2.0
"""Reading YAML files that users write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install

__all__ = ["read_yaml"]

_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
"""Of a number such as 1e-3, which PyYAML takes for text."""

_MERGE = "tag:yaml.org,2002:merge"
"""Of the key `<<`."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Args:
        path: the file.

    Raises:
        UserError: PyYAML is missing, or the file cannot be read or is not YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(f"{path}: reading YAML needs PyYAML; install it with: {pip_install('PyYAML')}") from None
    try:
        return _load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: {error}; save it in UTF-8") from None
    except ValueError as error:
        # PyYAML passes on the errors of int() and datetime for a value such as 2024-13-45.
        raise UserError(f"{path}: not valid YAML: {error}; put the value into quotes if it is text") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML for this: it has too many levels") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _load(text: str) -> Any:
    """Return the content of YAML in which no mapping has a key twice; PyYAML itself would take the last one.

    Raises:
        yaml.YAMLError: it is not YAML, or has a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._checked: set[Any] = set()

        def flatten_mapping(self, node: Any) -> None:
            # Afterwards a mapping has, in addition to its own keys, those that `<<` brings. It may come here again by
            # an alias.
            if node not in self._checked:
                self._checked.add(node)
                self._refuse_repetition(node)
            super().flatten_mapping(node)

        def _refuse_repetition(self, node: Any) -> None:
            seen: list[Any] = []
            for key_node, _ in node.value:
                if key_node.tag == _MERGE:
                    continue
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    problem = f"the key {key!r} is there twice; drop one of them"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.append(key)

    # As YAML 1.2 has it: without a point, too.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-.0123456789"))
    return yaml.load(text, Loader)  # a safe loader
