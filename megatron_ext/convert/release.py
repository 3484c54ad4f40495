# SPDX-License-Identifier: Apache-2.0
"""The folder of a converted model for Megatron's --load: a checkpoint without optimizer, and what goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert import torch_dist_writer
from megatron_ext.convert.hf_writer import write_json
from megatron_ext.convert.megatron_args import checkpoint_args, command_line, keeps_common_beside
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.convert.tokenizer_files import copy_tokenizer, tokenizer_files
from megatron_ext.convert.torch_dist_writer import write_checkpoint
from megatron_ext.convert.whole_folder import identity, resumed_folder
from megatron_ext.params import GlobalTensor, GptShape, gpt_parameters

__all__ = ["Converted", "Step", "write_release"]

Step = Callable[[str, int], None]
"""Is told of each tensor as it is written: its name and bytes."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion made."""

    folder: Path
    """For Megatron's --load."""

    settings: ModelSettings
    """The model."""

    parameters: int
    """Elements of all of its tensors."""

    dtype: torch.dtype
    """Of its parameters."""

    flags: tuple[str, ...]
    """Of Megatron's command line, tokenizer included."""


def write_release(
    target: Path,
    settings: ModelSettings,
    shape: GptShape,
    values: Callable[[GlobalTensor], torch.Tensor],
    task: Mapping[str, Any],
    *,
    source: Mapping[str, Path],
    tokenizer: Path,
    hf_config: Mapping[str, Any] | None,
    overwrite: bool,
    step: Step | None,
) -> Converted:
    """Write a checkpoint with which training begins at iteration 0 and with a new optimizer: Megatron's "release".

    Args:
        target: the folder; it appears when it is whole.
        settings: the model.
        shape: its tensors.
        values: what they are, each of its shape and type.
        task: what tells that a conversion which was cut off was the same one; it is resumed after the files that are
            whole.
        source: the folder that is read, by what the user calls it.
        tokenizer: folder that may have one, to be copied.
        hf_config: the model's ``config.json``, for the way back; None where there is none.
        overwrite: whether what an earlier conversion wrote in `target` is replaced.
        step: is told of the progress.

    Raises:
        UserError: the installed Megatron has no such layers, or `target` is not free.
    """

    def told(tensor: GlobalTensor) -> torch.Tensor:
        value = values(tensor)
        if step is not None:
            step(tensor.name, value.nbytes)
        return value

    args = checkpoint_args(settings, shape.padded_vocab_size)
    flags = command_line(settings)
    common_beside = keeps_common_beside()
    task = {
        **task,
        "flags": flags,
        "rows": shape.padded_vocab_size,
        "dtype": str(shape.dtype),
        "files": [torch_dist_writer.FILE_BYTES, common_beside],
        "hf_config": hf_config,
        "tokenizer": identity(tokenizer_files(tokenizer)),
    }
    with resumed_folder(target, task, inputs=source, overwrite=overwrite) as folder:
        write_checkpoint(
            folder / "release",
            shape,
            told,
            args,
            homogeneous=settings.is_homogeneous,
            common_beside=common_beside,
        )
        flags = [*flags, "--padded-vocab-size", str(shape.padded_vocab_size)]
        if copy_tokenizer(tokenizer, folder / "tokenizer"):
            # Absolute: Megatron is started in any folder.
            path = str(target.absolute() / "tokenizer")
            flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
        (folder / "megatron_flags.txt").write_text("\n".join(flags) + "\n", encoding="utf-8")
        if hf_config is not None:
            write_json(folder / "hf_config.json", hf_config)
        # The last one: without it Megatron loads nothing.
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
    return Converted(
        folder=target,
        settings=settings,
        parameters=sum(tensor.numel for tensor in gpt_parameters(shape)),
        dtype=shape.dtype,
        flags=tuple(flags),
    )
