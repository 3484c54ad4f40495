# SPDX-License-Identifier: Apache-2.0
"""What every feature answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ext.patching import Patch

__all__ = ["Feature"]


class Feature:
    """One feature: its arguments and its patches; what it does in a run are its methods marked with `@on`.

    A subclass adds the protocols of `megatron_ext.hooks.concerns` that it has: `class Mine(Feature, SavesState)`.
    """

    name: str = ""
    """Short name, used in errors, patch names and log keys."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the feature's argument groups."""

    def complete_arguments(self, args: Any) -> None:
        """Fill in arguments that a file of the user's or other arguments give; called before any feature validates.

        Called also when the feature is off.

        Raises:
            UserError: they cannot be filled in.
        """

    def enabled(self, args: Any) -> bool:
        """Return whether the parsed arguments ask for the feature."""
        return False

    def validate(self, args: Any) -> list[str]:
        """Return every problem of the arguments, one sentence each: the field, and what to change.

        Called before Megatron's own validation, also when the feature is off (for options that need it).
        """
        return []

    def adjust_arguments(self, args: Any) -> list[str]:
        """Change arguments that the feature decides; return one line to print for each change."""
        return []

    def required_patches(self) -> Sequence[Patch]:
        """Return every patch that the feature may need; they are applied only when it is enabled.

        An event is raised where the patch is applied that raises it: each event names it.
        """
        return ()
