# SPDX-License-Identifier: Apache-2.0
"""Reading YAML files that users write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

__all__ = ["read_yaml"]


def read_yaml(path: Path, extra: str) -> Any:
    """Return the content of a YAML file.

    Args:
        path: the file.
        extra: the package's extra that brings PyYAML, for the error without it.

    Raises:
        UserError: PyYAML is missing, or the file cannot be read or is not YAML.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(
            f"{path}: reading YAML needs PyYAML; install it with: pip install 'megatron-ext[{extra}]'"
        ) from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
