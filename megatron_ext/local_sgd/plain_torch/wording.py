# SPDX-License-Identifier: Apache-2.0
"""Messages that speak of the config classes' fields, where the engine speaks of Megatron's flags."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from megatron_ext.config_options import in_field_names
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

__all__ = ["as_fields", "speaks_of_fields"]

_CONFIGS = (LocalSGDConfig, OuterOptimizerConfig, GTAConfig, StreamingConfig)
_OTHERS = {
    r"(the )?--local-sgd-fragment options": "StreamingConfig",
    r"(the )?--local-sgd-pseudo-grad options of the reducer": "GTAConfig",
    # What only Megatron has, and what is said by both names.
    r" \(--no-load-optim, from a sync point\)": "",
    r"--data-parallel-random-init and ": "",
    r"\b(\w+) \(--local-sgd-ewma-relative\)": r"\1",
}


def as_fields(text: str) -> str:
    """Return a message with every flag of local SGD replaced by the field that it sets."""
    for said, instead in _OTHERS.items():
        text = re.sub(said, instead, text)
    fields = {name: entry for config in _CONFIGS for name, entry in config.__dataclass_fields__.items()}
    return in_field_names(text, fields, off="{}=False")


@contextlib.contextmanager
def speaks_of_fields() -> Iterator[None]:
    """Let errors that are raised within speak of fields."""
    try:
        yield
    except Exception as error:  # raised again, in other words
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (as_fields(error.args[0]),)
        raise
