# SPDX-License-Identifier: Apache-2.0
"""The two functions under which people who come from atorch know local SGD for Megatron."""

from __future__ import annotations

import argparse

from megatron_ext.activation import patch_megatron
from megatron_ext.errors import UserError

__all__ = ["local_sgd_args_provider", "patch_megatron_for_local_sgd"]


def patch_megatron_for_local_sgd() -> None:
    """Do what `megatron_ext.patch_megatron` does; call it before Megatron parses its arguments."""
    patch_megatron()


def local_sgd_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser, for Megatron's `extra_args_provider`: the patches have added local SGD's options already.

    Raises:
        UserError: they have not; the options would be read and change nothing.
    """
    if "--use-local-sgd" not in parser._option_string_actions:
        raise UserError(
            "local_sgd_args_provider was given to a Megatron that is not patched, on which local SGD's options have no "
            "effect; call patch_megatron_for_local_sgd() before Megatron parses its arguments"
        )
    return parser
