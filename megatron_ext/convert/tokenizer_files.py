# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's files, which go with a model."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["copy_tokenizer"]

_PATTERNS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy what `source` has of a tokenizer (and of how text is generated) into `target`.

    Returns:
        Whether there is a tokenizer.
    """
    files = sorted({file for pattern in _PATTERNS for file in source.glob(pattern) if file.is_file()})
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in files):
        return False
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, target / file.name)
    return True
