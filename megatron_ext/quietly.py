# SPDX-License-Identifier: Apache-2.0
"""Megatron without its warnings of what is not installed for training on GPUs, where nobody trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quietly"]


@contextmanager
def quietly() -> Iterator[None]:
    """Let nothing warn inside, neither by Python's warnings nor by a logger; what is printed is printed."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what this function is for
            yield
    finally:
        logging.disable(before)
