# SPDX-License-Identifier: Apache-2.0
"""See the package."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
