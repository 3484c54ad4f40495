# SPDX-License-Identifier: Apache-2.0
"""Which Hugging Face model a source is: from what it says of itself, and from a configuration that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.convert.families import (
    Family,
    family_for,
    family_named,
    no_place_for_predictions,
    read_config,
    write_config,
)
from megatron_ext.convert.flags import flag_of_field, known_tokens, settings_of
from megatron_ext.convert.hf_reader import read_json
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError

__all__ = ["Description", "described_by_args", "described_by_run", "former_config", "given_config"]

_COMPARED = (
    "num_attention_heads",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "qk_layernorm",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "position_embedding_type",
    "normalization",
    "swiglu",
)
"""What peers of a run agree on, under its flag, that says what the model computes."""

Description = tuple[Family, ModelSettings, dict[str, Any]]


def given_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, in a model's folder, or in a checkpoint that was made of a model.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return read_json(path)
    for name in ("config.json", "hf_config.json"):
        if (path / name).exists():
            return read_json(path / name)
    raise UserError(f"--hf-config {path}: no config.json and no hf_config.json is there")


def former_config(source: Path) -> dict[str, Any]:
    """Return the configuration of the model that a checkpoint was made of; empty where the checkpoint has none.

    Args:
        source: the checkpoint's folder, or one iteration in it.
    """
    folders = (source, source.parent) if (source / ".metadata").exists() else (source,)
    return next((read_json(path) for folder in folders if (path := folder / "hf_config.json").exists()), {})


def described_by_args(
    args: Any, family: str | None, config: Mapping[str, Any] | None, vocab_size: int | None, *, drop_mtp: bool = False
) -> Description:
    """Return what a checkpoint's arguments describe.

    Args:
        args: Megatron's arguments.
        family: model type of the result; None for the first that can say all.
        config: a configuration that was given; it has to describe the same model.
        vocab_size: rows that are kept.
        drop_mtp: whether layers of multi-token prediction are left out.

    Raises:
        UserError: no family, or not that one, can say all; or the configuration describes another model.
    """
    known = known_tokens(args)
    if config is None:
        _check_rows(vocab_size, known)
        settings = _kept(settings_of(args, vocab_size), drop_mtp)
        if family is not None:
            return family_named(family), settings, write_config(family_named(family), settings)
        found, written = family_for(settings)
        return found, settings, written
    named = family_named(config.get("model_type"))
    given = read_config(named, config)
    _check_rows(vocab_size, known or given.vocab_size)
    settings = _kept(settings_of(args, vocab_size or known or given.vocab_size), drop_mtp)
    different = settings.differences(given)
    if vocab_size is not None:
        different.pop("vocab_size", None)
    if different:
        told = "; ".join(f"{name} is {ours!r}, there {theirs!r}" for name, (ours, theirs) in different.items())
        raise UserError(f"--hf-config describes another model than the checkpoint: {told}")
    return named, settings, _with_predictions(named, settings, config)


def described_by_run(
    agreed: Mapping[str, str], config: Mapping[str, Any] | None, prediction_layers: int, vocab_size: int | None = None
) -> Description:
    """Return what the configuration for a sync service's snapshot describes.

    Args:
        agreed: what the run's peers agreed on; empty where nothing is known.
        config: the configuration that was given.
        prediction_layers: layers of multi-token prediction that are kept of it.
        vocab_size: rows that are kept; None for those of the configuration.

    Raises:
        UserError: there is none, or the peers agreed on something else.
    """
    if config is None:
        raise UserError(
            "a snapshot has tensors, and not how they are used: give --hf-config a Hugging Face model of the same "
            "architecture, or the checkpoint that the run began with"
        )
    family = family_named(config.get("model_type"))
    settings = replace(read_config(family, config), mtp_num_layers=prediction_layers or None)
    arguments = settings.arguments()
    different = [
        f"{flag} is {agreed[flag]} in the run, and {arguments[name]} by --hf-config"
        for name in _COMPARED
        if (flag := flag_of_field(name)) in agreed and agreed[flag] != str(arguments[name])
    ]
    if different:
        raise UserError("--hf-config describes another model than the run's peers agreed on: " + "; ".join(different))
    _check_rows(vocab_size, settings.vocab_size)
    settings = replace(settings, vocab_size=vocab_size or settings.vocab_size)
    return family, settings, _with_predictions(family, settings, config)


def _check_rows(vocab_size: int | None, tokens: int | None) -> None:
    """Check that the rows that are to be kept hold all tokens, as far as their number is known."""
    if vocab_size is None:
        return
    if vocab_size < 1:
        raise UserError(f"--vocab-size {vocab_size}: give a whole number of at least 1")
    if tokens is not None and vocab_size < tokens:
        raise UserError(
            f"--vocab-size {vocab_size}: {tokens} rows of the vocabulary are tokens, of which this would cut off "
            f"{tokens - vocab_size}; leave it out to keep them all, and no padding"
        )


def _kept(settings: ModelSettings, drop_mtp: bool) -> ModelSettings:
    return replace(settings, mtp_num_layers=None) if drop_mtp else settings


def _with_predictions(family: Family, settings: ModelSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, which says how many layers of multi-token prediction go with the model."""
    problems = no_place_for_predictions(family, settings)
    if problems:
        raise UserError(f"convert: a {family.model_type} model cannot be what this one is: {problems[0]}")
    number = {"num_nextn_predict_layers": settings.mtp_num_layers or 0} if family.predicts else {}
    return {**config, **number}
