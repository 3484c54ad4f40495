# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face model to a checkpoint that Megatron trains on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.convert.families import family_named, read_config
from megatron_ext.convert.flags import flags_of
from megatron_ext.convert.hf_names import Names, hf_tensors, parts_of
from megatron_ext.convert.hf_reader import HfModel
from megatron_ext.convert.megatron_args import checkpoint_args, keeps_common_beside
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.convert.tokenizer_files import copy_tokenizer
from megatron_ext.convert.torch_dist_writer import write_checkpoint
from megatron_ext.convert.whole_folder import fresh_folder
from megatron_ext.params import GlobalTensor, GptShape, gpt_parameters

__all__ = ["Converted", "from_hf"]

Step = Callable[[str, int], None]
"""Is told of each tensor that was read: its name and bytes."""


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


def from_hf(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    divisor: int = 1,
    ignored: Iterable[str] = (),
    overwrite: bool = False,
    step: Step | None = None,
) -> Converted:
    """Write a Hugging Face model as a checkpoint that stock Megatron loads with --load, in any layout.

    Training begins at iteration 0 with a new optimizer, as after Megatron's own conversions (a "release").

    Args:
        source: the model's folder.
        target: the checkpoint's.
        dtype: of the parameters; None for the embedding's in the source.
        divisor: the vocabulary's rows are padded with zeros to a multiple of it.
        ignored: fields of config.json, and tensors, to leave out.
        overwrite: whether a checkpoint in `target` is replaced.
        step: is told of the progress.

    Raises:
        UserError: the model, one of its files or a field of its configuration does not convert.
    """
    model = HfModel(source)
    family = family_named(model.config.get("model_type"))
    settings = read_config(family, model.config, ignored)
    plain = settings.shape()
    model.check(hf_tensors(plain, family.names), also=frozenset(ignored))
    shape = settings.shape(dtype or model.dtype("model.embed_tokens.weight"), divisor)

    def value(tensor: GlobalTensor) -> torch.Tensor:
        made = _assembled(model, tensor, shape, family.names)
        if step is not None:
            step(tensor.name, made.nbytes)
        return made

    args = checkpoint_args(settings, shape.padded_vocab_size)
    with fresh_folder(target, overwrite=overwrite) as folder:
        write_checkpoint(
            folder / "release",
            shape,
            value,
            args,
            homogeneous=settings.is_homogeneous,
            common_beside=keeps_common_beside(),
        )
        (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
        flags = [*flags_of(settings), "--padded-vocab-size", str(shape.padded_vocab_size)]
        if copy_tokenizer(source, folder / "tokenizer"):
            flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(target / "tokenizer")]
        (folder / "megatron_flags.txt").write_text("\n".join(flags) + "\n", encoding="utf-8")
        # For the way back: what Megatron has no argument for.
        shutil.copy(source / "config.json", folder / "hf_config.json")
    return Converted(
        folder=target,
        settings=settings,
        parameters=sum(tensor.numel for tensor in gpt_parameters(shape)),
        dtype=shape.dtype,
        flags=tuple(flags),
    )


def _assembled(model: HfModel, tensor: GlobalTensor, shape: GptShape, names: Names) -> torch.Tensor:
    """One of Megatron's tensors, of the rows that it is made of; rows that pad the vocabulary are zero."""
    parts = parts_of(tensor, shape, names)
    if len(parts) == 1 and parts[0].at == (0, tensor.shape[0]):
        return model.rows(parts[0].name, *parts[0].rows).to(tensor.dtype)
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for part in parts:
        made[slice(*part.at)] = model.rows(part.name, *part.rows)
    return made
