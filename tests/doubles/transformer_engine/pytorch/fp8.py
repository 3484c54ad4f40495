# SPDX-License-Identifier: Apache-2.0
"""Names that Megatron imports for FP8, which is missing."""

import contextlib


class FP8GlobalStateManager:
    """FP8 is off."""

    @classmethod
    def is_fp8_enabled(cls):
        return False


def fp8_autocast(enabled=True, **_kwargs):
    """Refuse, unless it is to be off."""
    if enabled:
        raise NotImplementedError("the double has no FP8")
    return contextlib.nullcontext()


fp8_model_init = fp8_autocast
