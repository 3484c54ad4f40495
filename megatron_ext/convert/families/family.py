# SPDX-License-Identifier: Apache-2.0
"""What a family of models is: its configuration in both directions, and its tensors' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from megatron_ext.convert.families.config_fields import ConfigFields
from megatron_ext.convert.hf_names import Names
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.errors import UserError

__all__ = [
    "Family",
    "common_config",
    "common_settings",
    "fields_left",
    "no_place_for_predictions",
    "read_config",
    "write_config",
]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's --use-rope-scaling has beside the factor."""

_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
"""What Megatron's yarn of latent attention has beside the factor and the temperatures."""

_TEMPERATURES = {"mscale": 1.0, "mscale_all_dim": 0.0}
"""Those of yarn, where a file has none."""

_FIXED: Mapping[str, Mapping[str, float]] = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}
"""By the type of scaling, what Megatron has no option for."""

_NEEDED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "llama3": frozenset({"factor", *_LLAMA3}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""By the type of scaling, what a file has to say: what is meant without it is not the same everywhere."""


class Family(Protocol):
    """A layout of Hugging Face's models."""

    model_type: str
    """Its name, as ``config.json`` has it."""

    architecture: str
    """The class in transformers."""

    names: Names
    """Of its tensors."""

    predicts: bool
    """Whether it has a place for layers of multi-token prediction."""

    def read(self, fields: ConfigFields) -> ModelSettings:
        """Return the model that a configuration describes; what does not convert is noted in `fields`."""

    def write(self, settings: ModelSettings) -> dict[str, Any]:
        """Return the configuration of a model as far as the family can say it."""


def common_settings(fields: ConfigFields, scalings: Sequence[str] = ("default", "llama3")) -> dict[str, Any]:
    """Take the fields that all families have, and return the settings they are.

    Args:
        fields: of the file.
        scalings: the types of ``rope_scaling`` that Megatron has for the family's attention.
    """
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    fields.must_be("hidden_act", "silu")
    base, scaling = _rotary(fields, scalings)
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": fields.need("num_key_value_heads", heads),
        "kv_channels": fields.take("head_dim", hidden // heads),
        "ffn_hidden_size": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "max_position_embeddings": fields.size("max_position_embeddings"),
        "layernorm_epsilon": fields.positive("rms_norm_eps", fields.need("rms_norm_eps", 1e-6)),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", False),
        "rotary_base": base,
        "attention_dropout": fields.part("attention_dropout"),
        **scaling,
    }


def common_config(settings: ModelSettings) -> dict[str, Any]:
    """Return the fields that all families have."""
    config = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.ffn_hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_query_groups,
        "head_dim": settings.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": settings.max_position_embeddings,
        "rms_norm_eps": settings.layernorm_epsilon,
        "attention_dropout": settings.attention_dropout,
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
        "rope_theta": float(settings.rotary_base),
        "rope_scaling": None,
    }
    if settings.use_rope_scaling:
        config["rope_scaling"] = {"rope_type": "llama3", "factor": settings.rope_scaling_factor, **_LLAMA3}
    elif settings.rope_type == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": settings.rotary_scaling_factor,
            "mscale": settings.mscale,
            "mscale_all_dim": settings.mscale_all_dim,
            **_YARN,
        }
    return config


def _rotary(fields: ConfigFields, scalings: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """The base of the frequencies, and how they are scaled."""
    # transformers 5 writes all of it into one field; earlier releases into two.
    parameters = fields.table("rope_parameters")
    base = fields.take("rope_theta", 10000.0) if "rope_theta" in parameters else fields.need("rope_theta", 10000.0)
    base = fields.positive("rope_theta", parameters.pop("rope_theta", base))
    scaling = {**parameters, **fields.table("rope_scaling")}
    if int(base) != base:
        fields.refuse(f"rope_theta is {base}, and Megatron's --rotary-base is a whole number")
    kind = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", kind)
    scaling.pop("rope_theta", None)
    if kind not in scalings:
        fields.refuse(f"rope_scaling is of type {kind!r}, and only {' or '.join(scalings)} converts in this family")
        return int(base), {}
    for name in sorted(_NEEDED[kind] - scaling.keys()):
        fields.refuse(f"rope_scaling.{name} is missing; write down what the model was trained with")
    for name, value in _FIXED[kind].items():
        found = scaling.pop(name, value)
        if found != value:
            fields.refuse(f"rope_scaling.{name} is {found!r}, and only {value!r} converts")
    read: dict[str, Any] = {}
    if kind == "llama3":
        factor = fields.positive("rope_scaling.factor", scaling.pop("factor", 8.0))
        read = {"use_rope_scaling": True, "rope_scaling_factor": factor}
    elif kind == "yarn":
        factor = fields.positive("rope_scaling.factor", scaling.pop("factor", 1.0))
        read = {"rope_type": "yarn", "rotary_scaling_factor": factor}
        for name, value in _TEMPERATURES.items():
            found = scaling.pop(name, value)
            read[name] = 0.0 if found == 0 else fields.positive(f"rope_scaling.{name}", found)
    for name, value in scaling.items():
        fields.refuse(f"rope_scaling.{name} ({value!r}) has no counterpart in Megatron")
    return int(base), read


def no_place_for_predictions(family: Family, settings: ModelSettings) -> list[str]:
    """Return what hinders a model's layers of multi-token prediction from going with it."""
    if not settings.mtp_num_layers or family.predicts:
        return []
    return [f"mtp_num_layers is {settings.mtp_num_layers} (there only None, --drop-mtp leaves these layers out)"]


def read_config(family: Family, config: Mapping[str, Any], ignored: Iterable[str] = ()) -> ModelSettings:
    """Return the model that a ``config.json`` describes.

    Args:
        family: its family.
        config: the file's content.
        ignored: fields to leave out of account.

    Raises:
        UserError: naming every field that does not convert.
    """
    fields = ConfigFields(config, family.model_type)
    settings = family.read(fields)
    fields.finish(ignored)
    return settings


def fields_left(family: Family, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of a ``config.json`` that have no counterpart: those that may be left out of account.

    Args:
        family: its family.
        config: the file's content.
    """
    fields = ConfigFields(config, family.model_type)
    family.read(fields)
    return fields.left


def write_config(family: Family, settings: ModelSettings) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Raises:
        UserError: the family cannot say something of the model; it is named.
    """
    config = {"architectures": [family.architecture], "model_type": family.model_type, **family.write(settings)}
    if family.predicts:
        config["num_nextn_predict_layers"] = settings.mtp_num_layers or 0
    fields = ConfigFields(config, family.model_type)
    lost = settings.differences(family.read(fields))
    told = [f"{name} is {ours!r} (there only {theirs!r})" for name, (ours, theirs) in lost.items()]
    told += no_place_for_predictions(family, settings)
    if told or fields.problems:
        raise UserError(
            f"convert: a {family.model_type} model cannot be what this one is: " + "; ".join((*told, *fields.problems))
        )
    return config
