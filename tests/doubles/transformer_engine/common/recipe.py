# SPDX-License-Identifier: Apache-2.0
"""Base classes of recipes that are not there."""


class DelayedScaling:
    """Base class of Megatron's."""
