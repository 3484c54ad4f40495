# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face's models, one class each, and which one a model is of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_ext.convert.families.config_fields import carried_fields
from megatron_ext.convert.families.deepseek import DeepseekV2, DeepseekV3
from megatron_ext.convert.families.dense import Llama, Qwen2, Qwen3
from megatron_ext.convert.families.family import (
    Family,
    fields_left,
    no_place_for_predictions,
    read_config,
    write_config,
)
from megatron_ext.convert.families.mixtures import Mixtral, Olmoe, Qwen2Moe, Qwen3Moe
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError

__all__ = [
    "FAMILIES",
    "Family",
    "carried_fields",
    "family_for",
    "family_named",
    "fields_left",
    "no_place_for_predictions",
    "read_config",
    "write_config",
]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            *(Llama(), Qwen2(), Qwen3()),
            *(Mixtral(), Qwen3Moe(), Qwen2Moe(), Olmoe()),
            *(DeepseekV3(), DeepseekV2()),
        )
    }
)
"""By the name of the model type."""


def family_named(model_type: Any) -> Family:
    """Return the family that a ``config.json`` names.

    Raises:
        UserError: it does not convert.
    """
    try:
        return FAMILIES[model_type]
    except (KeyError, TypeError):
        raise UserError(f"model_type is {model_type!r}; what converts is {', '.join(FAMILIES)}") from None


def family_for(settings: ModelSettings) -> tuple[Family, dict[str, Any]]:
    """Return the first family that can say all of a model, and its configuration.

    Args:
        settings: the model.

    Raises:
        UserError: none can; the nearest one's reasons are given.
    """
    refusals = []
    for family in FAMILIES.values():
        try:
            return family, write_config(family, settings)
        except UserError as error:
            refusals.append(error)
    raise min(refusals, key=lambda error: str(error).count(";"))
