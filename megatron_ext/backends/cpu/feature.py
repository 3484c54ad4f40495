# SPDX-License-Identifier: Apache-2.0
"""The CPU backend's part in validating a run's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.backends.cpu.options import problems
from megatron_ext.hooks import Feature
from megatron_ext.patching import Patch
from megatron_ext.seams import checkpoint

__all__ = ["CpuFeature"]


class CpuFeature(Feature):
    """Refuses, by name, the options that cannot work on CPU."""

    name = "cpu"

    def enabled(self, args: Any) -> bool:
        """Return True: this object exists only where the backend is in force."""
        return True

    def validate(self, args: Any) -> list[str]:
        """Return the options that cannot work on CPU."""
        return problems(args)

    def required_patches(self) -> Sequence[Patch]:
        """Return the patches that runs on CPU need to resume from their checkpoints, of which most are in fp32."""
        return checkpoint.repairs()
