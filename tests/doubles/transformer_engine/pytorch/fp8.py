# SPDX-License-Identifier: Apache-2.0
"""Names that Megatron imports for FP8, which is missing."""


class FP8GlobalStateManager:
    """FP8 is off."""

    @classmethod
    def is_fp8_enabled(cls):
        return False


def fp8_autocast(*_args, **_kwargs):
    """Refuse."""
    raise NotImplementedError("the double has no FP8")


fp8_model_init = fp8_autocast
