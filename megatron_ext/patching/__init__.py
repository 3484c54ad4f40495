# SPDX-License-Identifier: Apache-2.0
"""Patches as records: applied after their gates passed, undone by identity, explained on request."""

from megatron_ext.patching.patch import MEGATRON_VERSIONS, Patch, PatchError, PatchStatus, SeamUnavailable
from megatron_ext.patching.registry import PatchRegistry

__all__ = ["MEGATRON_VERSIONS", "Patch", "PatchError", "PatchRegistry", "PatchStatus", "SeamUnavailable"]
