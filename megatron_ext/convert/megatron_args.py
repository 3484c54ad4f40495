# SPDX-License-Identifier: Apache-2.0
"""The arguments that a checkpoint keeps for Megatron: made for a converted model, and read out of any."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.convert.flags import flags_of
from megatron_ext.convert.settings import NORMS_OVER_HEADS, ModelSettings
from megatron_ext.errors import UserError
from megatron_ext.quietly import quietly

__all__ = ["checkpoint_args", "command_line", "keeps_common_beside", "read_args"]


def checkpoint_args(settings: ModelSettings, rows: int) -> argparse.Namespace:
    """Return the arguments that a checkpoint of the model has: Megatron's defaults, and those of the model.

    Args:
        settings: the model.
        rows: of its embedding, padding included.
    """
    with quietly():
        from megatron.training.arguments import add_megatron_arguments

    parser: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([])
    for name, value in settings.arguments().items():
        setattr(args, name, value)
    args.padded_vocab_size = rows
    return args


def keeps_common_beside() -> bool:
    """Return whether the installed Megatron keeps arguments and counters beside the tensors' files, as up to 0.18."""
    with quietly():
        from megatron.core.dist_checkpointing import serialization

    return not hasattr(serialization, "load_common_state_dict") or not hasattr(
        serialization, "_legacy_common_state_exists"
    )


def command_line(settings: ModelSettings) -> list[str]:
    """Return `flags_of` a model as the installed Megatron takes them.

    Raises:
        UserError: that Megatron has no such layers.
    """
    flags = flags_of(settings)
    if settings.layer_spec is None or find_spec("megatron.core.transformer.mla_qk_norm_config") is not None:
        return flags
    if settings.layer_spec == NORMS_OVER_HEADS:
        raise UserError(
            "convert: norms over all heads at once are layers of megatron_ext.layer_specs, which needs Megatron-core "
            "0.19 or later; install it, or convert with an environment that has it"
        )
    # Up to 0.18 Megatron builds no norm for queries that are not projected down.
    at = flags.index("--spec")
    return flags[:at] + flags[at + 3 :]


def read_args(folder: Path) -> Any:
    """Return the arguments in a torch_dist checkpoint.

    Args:
        folder: of one iteration.

    Raises:
        UserError: it has none, or they cannot be read.
    """
    with quietly():
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    try:
        with quietly():  # torch says that it reads in one process
            args = load_common_state_dict(str(folder)).get("args")
    except (Exception, CheckpointException) as error:  # whatever reading a damaged or a foreign file raises
        reason = str(error).strip().rpartition("\n")[2] or repr(error)
        raise UserError(f"{folder}: the checkpoint's arguments cannot be read ({reason})") from error
    if args is None:
        raise UserError(f"{folder}: the checkpoint has no arguments; it was not written by Megatron's training")
    return args
