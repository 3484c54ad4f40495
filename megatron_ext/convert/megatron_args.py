# SPDX-License-Identifier: Apache-2.0
"""The arguments that a checkpoint keeps for Megatron: made for a converted model, and read out of any."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.convert.flags import PLAIN_QUERIES
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError
from megatron_ext.quietly import quietly

__all__ = ["checkpoint_args", "keeps_common_beside", "layer_flags", "read_args"]


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


def layer_flags(settings: ModelSettings) -> list[str]:
    """Return flags that name the model's layers, where the installed Megatron has no option for them."""
    needed = settings.multi_latent_attention and settings.qk_layernorm and settings.q_lora_rank is None
    # Up to 0.18 Megatron builds no norm for queries that are not projected down.
    if not needed or find_spec("megatron.core.transformer.mla_qk_norm_config") is None:
        return []
    return ["--spec", *PLAIN_QUERIES]


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
