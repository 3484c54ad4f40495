# SPDX-License-Identifier: Apache-2.0
"""Dense models: Llama, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from megatron_ext.convert.families.config_fields import ConfigFields
from megatron_ext.convert.families.family import common_config, common_settings
from megatron_ext.convert.hf_names import Names
from megatron_ext.convert.settings import ModelSettings

__all__ = ["Llama", "Qwen2", "Qwen3"]


class Llama:
    """Llama 2 and 3, and what has their layout; without biases, or with one in every linear layer."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        bias = bool(fields.take("attention_bias", False))
        if bool(fields.take("mlp_bias", False)) != bias:
            fields.refuse("attention_bias and mlp_bias differ; in Megatron all linear layers have a bias or none has")
        return ModelSettings(add_bias_linear=bias, **common_settings(fields))

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        bias = settings.add_bias_linear
        return {**common_config(settings), "attention_bias": bias, "mlp_bias": bias}


class Qwen2:
    """Qwen 2 and 2.5: the projections of queries, keys and values have a bias."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        no_window(fields)
        return ModelSettings(add_qkv_bias=True, **common_settings(fields))

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return common_config(settings)


class Qwen3:
    """Qwen 3: queries and keys are normalised, head by head."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    names = Names()
    predicts = False

    def read(self, fields: ConfigFields) -> ModelSettings:
        """See `Family.read`."""
        no_window(fields)
        fields.must_be("attention_bias", False)
        fields.must_have("head_dim")
        return ModelSettings(qk_layernorm=True, **common_settings(fields))

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """See `Family.write`."""
        return {**common_config(settings), "attention_bias": False}


def no_window(fields: ConfigFields) -> None:
    """Take the fields of a sliding window, which must not be used."""
    others = sorted(set(fields.take("layer_types", [])) - {"full_attention"}, key=str)
    if others:
        fields.refuse(f"layer_types has {', '.join(map(str, others))}, and only full_attention converts")
    used = fields.take("use_sliding_window", False)
    window = fields.take("sliding_window")
    if used:
        fields.refuse(f"use_sliding_window is true (a window of {window}), and only full attention converts")
