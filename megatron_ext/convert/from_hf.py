# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face model to a checkpoint that Megatron trains on from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from megatron_ext.convert.dtypes import fitting, trained_dtype
from megatron_ext.convert.families import FAMILIES, Family, family_named, fields_left, read_config
from megatron_ext.convert.hf_names import Names, hf_tensors, parts_of, prediction_copies
from megatron_ext.convert.hf_reader import HfModel
from megatron_ext.convert.release import Converted, Step, write_release
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.convert.whole_folder import identity
from megatron_ext.errors import UserError
from megatron_ext.params import GlobalTensor, GptShape

__all__ = ["from_hf"]


def from_hf(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    divisor: int = 1,
    ignored: Iterable[str] = (),
    mtp: bool = False,
    overwrite: bool = False,
    step: Step | None = None,
) -> Converted:
    """Write a Hugging Face model as a checkpoint that stock Megatron loads with --load, in any layout.

    Training begins at iteration 0 with a new optimizer, as after Megatron's own conversions (a "release"). A conversion
    that was cut off and is started again with the same arguments resumes after the files that are whole.

    Args:
        source: the model's folder.
        target: the checkpoint's.
        dtype: of the parameters; None for the embedding's in the source.
        divisor: the vocabulary's rows are padded with zeros to a multiple of it.
        ignored: fields of config.json, and tensors, to leave out; each leaves out some, and none that is needed.
        mtp: whether its layers of multi-token prediction are taken, too.
        overwrite: whether what an earlier conversion wrote in `target` is replaced.
        step: is told of the progress.

    Raises:
        UserError: the model, one of its files or a field of its configuration does not convert.
    """
    ignored = tuple(ignored)
    model = HfModel(source)
    family = family_named(model.config.get("model_type"))
    try:
        settings = _read(model, family, ignored, mtp)
    except UserError as error:
        if (other := _another_family(model, family)) is None:
            raise
        raise UserError(f"{error}; all of its fields and tensors fit model_type {other.model_type!r}") from error
    plain = settings.shape()
    shape = settings.shape(dtype or trained_dtype(_one_dtype(model, plain, family.names), model.folder), divisor)

    return write_release(
        target,
        settings,
        shape,
        lambda tensor: _assembled(model, tensor, shape, family.names),
        {"config": model.config, "ignored": sorted(ignored), "of": identity(model.files)},
        source={"MODEL": source},
        tokenizer=source,
        hf_config=model.config,
        overwrite=overwrite,
        step=step,
    )


def _read(model: HfModel, family: Family, ignored: tuple[str, ...], mtp: bool) -> ModelSettings:
    """What the model is, as a model of a family; checks that it has its fields and tensors, and no others."""
    settings = read_config(family, model.config, ignored)
    if mtp:
        settings = replace(settings, mtp_num_layers=_prediction_layers(model, family))
    plain = settings.shape()
    hint = "--mtp takes layers of multi-token prediction" if family.predicts and not mtp else None
    tensors = hf_tensors(plain, family.names)
    _check_ignored(ignored, model, fields_left(family, model.config), frozenset(tensor.name for tensor in tensors))
    model.check(tensors, also=frozenset(ignored), hint=hint)
    for copy, of in prediction_copies(plain).items():
        model.check_equal(copy, of)
    return settings


def _another_family(model: HfModel, family: Family) -> Family | None:
    """The family that a model which is not of the one that it names can be of; None where no other fits."""
    for other in FAMILIES.values():
        if other is family:
            continue
        try:
            _read(model, other, (), mtp=False)
        except UserError:
            continue
        return other
    return None


def _check_ignored(ignored: Iterable[str], model: HfModel, fields: frozenset[str], needed: frozenset[str]) -> None:
    """Check that every name that was given to --ignore leaves something out, and nothing that the model needs."""
    for name in ignored:
        if name in fields:
            continue
        matching = sorted(tensor for tensor in model.names if fnmatch(tensor, name))
        if wanted := [tensor for tensor in matching if tensor in needed]:
            raise UserError(f"{model.folder}: --ignore {name}: the model needs {wanted[0]}; name others alone")
        if matching:
            continue
        reason = (
            "the conversion reads this field of config.json, or it has no meaning for the model anyway"
            if name in model.config
            else "no field of config.json has this name, and no tensor's name fits it"
        )
        raise UserError(f"{model.folder}: --ignore {name} leaves nothing out: {reason}; leave the option out")


def _prediction_layers(model: HfModel, family: Family) -> int:
    """How many layers of multi-token prediction the model has."""
    number = model.config.get("num_nextn_predict_layers") if family.predicts else None
    if not isinstance(number, int) or number < 1:
        raise UserError(
            f"{model.folder}: --mtp: num_nextn_predict_layers of config.json is {number!r}"
            if family.predicts
            else f"{model.folder}: --mtp: a {family.model_type} model has no layers of multi-token prediction"
        )
    return number


def _one_dtype(model: HfModel, shape: GptShape, names: Names) -> torch.dtype:
    """The type of all parameters, so that none is rounded without a word."""
    found: dict[torch.dtype, str] = {}
    for tensor in hf_tensors(shape, names):
        if tensor.sources[0][0].kind == "parameter":
            found.setdefault(model.dtype(tensor.name), tensor.name)
    if len(found) > 1:
        told = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in found.items())
        raise UserError(f"{model.folder}: the weights are of several types: {told}; --dtype chooses one for all")
    return next(iter(found))


def _assembled(model: HfModel, tensor: GlobalTensor, shape: GptShape, names: Names) -> torch.Tensor:
    """One of Megatron's tensors, of the rows that it is made of; rows that pad the vocabulary are zero."""
    parts = parts_of(tensor, shape, names)
    if len(parts) == 1 and parts[0].at == (0, tensor.shape[0]):
        return fitting(model.rows(parts[0].name, *parts[0].rows), tensor.dtype, parts[0].name)
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for part in parts:
        made[slice(*part.at)] = fitting(model.rows(part.name, *part.rows), tensor.dtype, part.name)
    return made
