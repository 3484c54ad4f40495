# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint, or a sync service's snapshot, to a Hugging Face model."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert.description import (
    Description,
    described_by_args,
    described_by_run,
    former_config,
    given_config,
)
from megatron_ext.convert.dtypes import described_dtype, fitting, trained_dtype
from megatron_ext.convert.families import Family, carried_fields
from megatron_ext.convert.hf_names import HfTensor, hf_tensors
from megatron_ext.convert.hf_writer import check_weights, grouped, write_json, write_weights
from megatron_ext.convert.legacy_reader import LegacyFiles, LegacyReader
from megatron_ext.convert.megatron_args import read_args
from megatron_ext.convert.model_sources import (
    Snapshots,
    Source,
    checkpoint_folder,
    find_snapshots,
    is_checkpoint,
    open_checkpoint,
    prediction_layers,
)
from megatron_ext.convert.tokenizer_files import (
    copy_tokenizer,
    generation_config,
    largest_id,
    tokenizer_files,
    tokenizer_folder,
)
from megatron_ext.convert.whole_folder import identity, resumed_folder
from megatron_ext.errors import UserError
from megatron_ext.legacy_format.legacy_folder import is_legacy
from megatron_ext.params import GptShape, gpt_parameters
from megatron_ext.params.gpt import WORD_EMBEDDING
from megatron_ext.params.tensors import EMBEDDING_UNIT, OUTPUT_UNIT

__all__ = ["Exported", "ToHf", "to_hf"]

Step = Callable[[str, int], None]
"""Is told of each tensor that is written: its name and bytes."""


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """What to convert, and how."""

    source: Path
    """A checkpoint's folder (``--save``), one iteration of it, or a sync service's folder, run or snapshot."""

    target: Path
    """The folder of the Hugging Face model."""

    iteration: int | None = None
    """Of the checkpoint; the newest without it."""

    weights: str = "model"
    """Which of a checkpoint's models: ``model`` (what stock Megatron reads), ``anchor`` (the parameters that local SGD
    last synchronised) or ``worker:N``."""

    family: str | None = None
    """Model type of the result; without it the first that can say all of the model."""

    config: Path | None = None
    """A Hugging Face model of the same architecture: its ``config.json`` is used, and its tokenizer. A snapshot needs
    one."""

    tokenizer: Path | None = None
    """Folder of the tokenizer that goes with the model; without it that of `config`, or the source's."""

    dtype: torch.dtype | None = None
    """Of the weights; without it that of the source."""

    vocab_size: int | None = None
    """Rows of the vocabulary that are kept, at least as many as are known to be tokens; without it those of a
    conversion's checkpoint, or what `config` says, else all."""

    max_shard_bytes: int = 5 * 10**9
    """Size that a file should not exceed."""

    drop_mtp: bool = False
    """Whether layers of multi-token prediction are left out."""

    overwrite: bool = False
    """Whether what an earlier conversion wrote in the target's folder is replaced."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What a conversion made."""

    folder: Path
    """Of the model."""

    family: Family
    """Its family."""

    tensors: int
    """How many it has."""

    parameters: int
    """Elements of all of them."""

    dtype: torch.dtype
    """Of all of them."""

    described: str | None
    """The type of which the configuration that was given says that its weights are."""

    vocab_size: int
    """Rows of the vocabulary that it has."""

    padding: int
    """Rows of the vocabulary that were left out."""

    has_tokenizer: bool
    """Whether a tokenizer went with it."""

    has_former: bool
    """Whether a configuration was known that says what a checkpoint does not, such as the special tokens."""


def to_hf(options: ToHf, step: Step | None = None) -> Exported:
    """Write a model as a Hugging Face folder that transformers loads.

    One file of weights is in memory at a time. A conversion that was cut off and is started again with the same options
    resumes after the files that are whole.

    Raises:
        UserError: something of the model has no counterpart, the source lacks a tensor, or a file is damaged.
    """
    source, files, (family, settings, config) = _opened(options)
    former = former_config(options.source) if options.config is None else config
    if options.config is None:
        config = {**carried_fields(former, family.model_type), **config}
    tokenizer = _tokenizer(options, settings.vocab_size)
    beside = [path for path in (tokenizer, options.config, options.source) if path is not None]
    generation = generation_config(beside)
    if options.vocab_size is not None:
        config["vocab_size"] = options.vocab_size
    if WORD_EMBEDDING not in source:
        raise UserError(f"{options.source}: has no {WORD_EMBEDDING}, so that it is not a model of Megatron's; give one")
    dtype = options.dtype or trained_dtype(source.dtype(WORD_EMBEDDING), options.source)
    described = described_dtype(config)
    # Releases of transformers know the one name or the other, and new ones take `dtype` where both are there.
    config.pop("dtype", None)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    shape = settings.shape(dtype)
    stored = _check(source, shape, prediction_layers(source) if options.drop_mtp else 0)
    tensors = hf_tensors(shape, family.names)
    read = functools.lru_cache(maxsize=2)(source.read)

    def value(tensor: HfTensor) -> torch.Tensor:
        parts = [read(ours.name)[slice(*part.at)] for ours, part in tensor.sources]
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tensor.sources[0][0].kind == "parameter":  # a balancing bias stays in fp32
            made = fitting(made, dtype, tensor.name)
        if step is not None:
            step(tensor.name, made.nbytes)
        return made.clone()

    groups = grouped(tensors, dtype.itemsize, options.max_shard_bytes)
    task = {
        "weights": options.weights,
        "config": config,
        "of": identity(files),
        "files": [[tensor.name for tensor in group] for group in groups],
        "tokenizer": identity(tokenizer_files(tokenizer)) if tokenizer is not None else [],
        "generation": identity([generation]) if generation is not None else [],
    }
    inputs = {"SOURCE": options.source, "--hf-config": options.config, "--tokenizer": options.tokenizer}
    with resumed_folder(options.target, task, inputs=inputs, overwrite=options.overwrite) as folder:
        write_weights(folder, groups, value, dtype.itemsize)
        check_weights(folder, groups)
        write_json(folder / "config.json", config)
        if generation is not None:
            shutil.copyfile(generation, folder / generation.name)
        has_tokenizer = tokenizer is not None and copy_tokenizer(tokenizer, folder)
    return Exported(
        folder=options.target,
        family=family,
        tensors=len(tensors),
        parameters=sum(tensor.numel for tensor in tensors),
        dtype=dtype,
        described=described,
        vocab_size=settings.vocab_size,
        padding=stored - settings.vocab_size,
        has_tokenizer=has_tokenizer,
        has_former=bool(former),
    )


def _opened(options: ToHf) -> tuple[Source, tuple[Path, ...], Description]:
    """The tensors, the files that say which they are, and the model."""
    config = None if options.config is None else given_config(options.config)
    if is_checkpoint(options.source):
        folder = checkpoint_folder(options.source, options.iteration)
        if is_legacy(folder):
            return _opened_legacy(folder, options, config)
        reader = open_checkpoint(folder, options.weights)
        described = described_by_args(
            read_args(folder), options.family, config, options.vocab_size, drop_mtp=options.drop_mtp
        )
        return reader, (folder / ".metadata",), described
    if options.weights != "model" or options.iteration is not None:
        raise UserError(f"{options.source}: --weights and --iteration choose in a checkpoint, and it is none")
    snapshots = Snapshots(find_snapshots(options.source))
    predictions = 0 if options.drop_mtp else prediction_layers(snapshots)
    return snapshots, snapshots.files, described_by_run(snapshots.agreed(), config, predictions, options.vocab_size)


def _tokenizer(options: ToHf, rows: int) -> Path | None:
    """The folder of the tokenizer that goes with a model of `rows` tokens; None without one."""
    given = (path for path in (options.config, options.source) if path is not None)
    if options.tokenizer is not None:
        found = tokenizer_folder(options.tokenizer)
        if found is None:
            raise UserError(
                f"--tokenizer {options.tokenizer}: no tokenizer is there; give a folder with tokenizer.json, "
                "tokenizer.model or vocab.json"
            )
    else:
        found = next(filter(None, map(tokenizer_folder, given)), None)
    if found is None or (options.tokenizer is None and options.vocab_size is None):
        return found
    largest = largest_id(found)
    if largest is not None and largest >= rows:
        said = f"--vocab-size {rows}" if options.tokenizer is None else f"--tokenizer {options.tokenizer}"
        raise UserError(
            f"{said}: the tokenizer's ids go up to {largest}, and the model has {rows} rows; give the tokenizer that "
            "the model was trained with, and no smaller --vocab-size"
        )
    return found


def _opened_legacy(
    folder: Path, options: ToHf, config: dict[str, Any] | None
) -> tuple[Source, tuple[Path, ...], Description]:
    """The same of a checkpoint in the legacy format."""
    if options.weights != "model":
        raise UserError(
            f"{folder}: --weights {options.weights} chooses in torch_dist checkpoints; load this one without "
            "--ckpt-format torch in the run that wrote it, and save"
        )
    files = LegacyFiles(folder)
    described = described_by_args(files.args, options.family, config, options.vocab_size, drop_mtp=options.drop_mtp)
    whole = replace(described[1], mtp_num_layers=getattr(files.args, "mtp_num_layers", None))
    return LegacyReader(files, whole), tuple(files.paths.values()), described


def _check(source: Source, shape: GptShape, dropped: int) -> int:
    """Check that the source has the model's tensors and no others; return the rows of its embedding.

    `dropped` layers of multi-token prediction may be there besides.
    """
    tensors = gpt_parameters(shape)
    rows = 0
    for tensor in tensors:
        if tensor.name not in source:
            raise UserError(f"the source lacks {tensor.name}, which the model has")
        found = source.shape(tensor.name)
        wanted = tensor.shape
        if tensor.unit in (EMBEDDING_UNIT, OUTPUT_UNIT) and found[0] >= wanted[0]:
            rows, wanted = found[0], (found[0], *wanted[1:])
        if found != wanted:
            raise UserError(f"{tensor.name} has shape {found} in the source, and the model says {wanted}")
    also = gpt_parameters(replace(shape, mtp_num_layers=dropped)) if dropped else ()
    unknown = source.unknown(frozenset(tensor.name for tensor in (*tensors, *also)))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"the source has {unknown[0]}{more}, which the model does not have")
    return rows
