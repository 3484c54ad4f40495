# SPDX-License-Identifier: Apache-2.0
"""The ways to train that are measured and simulated, and on which links."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ext.outer.codecs.all_codecs import build_codec

__all__ = ["LAYERS", "LEAST_VALUES", "SETTINGS", "VALUES", "Setting", "chosen_settings", "values_at"]

LAYERS = 8

VALUES = {100: 1_000_000, 1000: 4_000_000}
"""Of the model, by Mbit/s."""

LEAST_VALUES = 1000
"""Of a model: below, fragments of equal layers have hardly any."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to train."""

    name: str
    """For people."""

    kind: str
    """Of the worker's orders."""

    interval: int = 1
    """H."""

    codec: str | None = None
    """Of messages; None for fp32."""

    fragments: int = 1
    """Of the model."""

    delay: int = 0
    """tau."""

    intervals: int = 5
    """That are measured."""

    def sent(self, values: int) -> float:
        """Return the bytes of one way of its rounds, all parts together, for a model of a number of values."""
        if self.kind == "synchronous":
            return 2 * values
        return build_codec(self.codec or "fp32").nbytes(values // self.fragments)


SETTINGS = (
    Setting(name="synchronous", kind="synchronous", intervals=30),
    Setting(name="DiLoCo, H 5", kind="local_sgd", interval=5, intervals=10),
    Setting(name="DiLoCo, H 20", kind="local_sgd", interval=20),
    Setting(name="DiLoCo, H 20, int8", kind="local_sgd", interval=20, codec="int8"),
    Setting(name="streaming, H 20, tau 2", kind="local_sgd", interval=20, fragments=4, delay=2),
    Setting(name="streaming, H 20, tau 2, int4", kind="local_sgd", interval=20, fragments=4, delay=2, codec="int4"),
    Setting(name="service, H 20", kind="service", interval=20, codec="fp32"),
    Setting(name="service, H 20, int8", kind="service", interval=20, codec="int8"),
)


def chosen_settings(names: Collection[str] | None) -> list[Setting]:
    """Return the settings of these names in their order here; all when None."""
    return [setting for setting in SETTINGS if names is None or setting.name in names]


def values_at(mbits: int) -> int:
    """Return the size of the model on links of a rate."""
    return VALUES.get(mbits, 10_000 * mbits)
