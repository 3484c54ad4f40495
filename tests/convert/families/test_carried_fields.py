# SPDX-License-Identifier: Apache-2.0
"""What transformers reads of a ``config.json`` is the same after the way there and back, except what has to differ."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.convert.families import FAMILIES, carried_fields
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.convert.upcycle import upcycle
from megatron_ext.convert.upcycle_config import UpcycleConfig
from tests.convert import models

TEXT = {
    "bos_token_id": 0,
    "eos_token_id": [0, 3],
    "pad_token_id": 5,
    "use_cache": False,
    "initializer_range": 0.013,
    "output_router_logits": True,
}
"""Values that are no family's own."""

OF_A_FAMILY = {
    "llama": {"pretraining_tp": 2},
    **{name: {"max_window_layers": 1} for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")},
    **{name: {"ep_size": 2, "pretraining_tp": 2} for name in ("deepseek_v2", "deepseek_v3")},
}

_HEAD = {"head_dim": "transformers takes it of other fields where it is missing; its value is written out"}
_CHOICE = {"scoring_func": "of DeepSeek's own code, for which it is written"}
DIFFERENT: dict[str, dict[str, str]] = {
    "qwen2": _HEAD,
    "qwen2_moe": _HEAD,
    "mixtral": _HEAD,
    "deepseek_v2": _CHOICE,
    "deepseek_v3": {
        **_CHOICE,
        "topk_method": "likewise",
        "num_nextn_predict_layers": "transformers saves 1, and no such layer; 0 is written",
    },
}
"""By family, the fields that differ, and why they must."""


def read(folder: Path) -> dict[str, Any]:
    """Return what transformers reads of a model's configuration, but where it is."""
    import transformers

    read: dict[str, Any] = transformers.AutoConfig.from_pretrained(folder).to_dict()
    read.pop("_name_or_path", None)
    return read


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the names of fields in which two configurations differ."""
    missing = object()
    return {name for name in one.keys() | other.keys() if one.get(name, missing) != other.get(name, missing)}


def change(folder: Path, fields: dict[str, Any]) -> None:
    """Let a model's configuration have these fields, and say itself how text is generated."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize("name", models.MODELS)
def test_every_field_that_transformers_reads_comes_back(name: str, tmp_path: Path):
    source = models.save(name, tmp_path / "model")
    family = json.loads((source / "config.json").read_text())["model_type"]
    change(source, {**TEXT, **OF_A_FAMILY.get(family, {})})
    from_hf(source, tmp_path / "start")
    for start in ("start", "start/release"):
        to_hf(ToHf(source=tmp_path / start, target=tmp_path / "back", overwrite=True))
        assert differences(read(source), read(tmp_path / "back")) == DIFFERENT.get(family, {}).keys()
    # With a configuration that is given all of it is kept.
    to_hf(ToHf(source=tmp_path / "start", target=tmp_path / "given", config=source))
    assert differences(read(source), read(tmp_path / "given")) <= {"num_nextn_predict_layers"}


def test_every_named_difference_is_one():
    assert DIFFERENT.keys() | OF_A_FAMILY.keys() <= FAMILIES.keys()


def test_how_text_is_generated_goes_with_a_model_that_has_no_tokenizer(tmp_path: Path):
    import transformers

    source = models.save("llama", tmp_path / "model")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "temperature": 0.5}))
    made = from_hf(source, tmp_path / "start")
    assert "--tokenizer-model" not in made.flags
    for given in (None, source, tmp_path / "start"):
        to_hf(ToHf(source=tmp_path / "start", target=tmp_path / "back", config=given, overwrite=True))
        found = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
        assert (found.eos_token_id, found.temperature) == ([0, 7], 0.5)


def test_a_mixture_has_the_tokens_of_the_dense_model_and_none_of_its_familys_own_fields(tmp_path: Path):
    source = models.save("llama", tmp_path / "model")
    change(source, {**TEXT, "pretraining_tp": 2})
    from_hf(source, tmp_path / "start")
    upcycle(tmp_path / "start", tmp_path / "mixture", UpcycleConfig(num_experts=4))
    to_hf(ToHf(source=tmp_path / "mixture", target=tmp_path / "back"))
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    every = {name: value for name, value in TEXT.items() if name != "output_router_logits"}
    assert found["model_type"] == "mixtral" and found.items() >= every.items()
    assert not found.keys() & {"pretraining_tp", "output_router_logits"}


def test_what_is_of_the_file_alone_is_not_carried_to_another():
    former = {"model_type": "llama", "auto_map": {}, "transformers_version": "1", "torch_dtype": "float16"}
    assert carried_fields(former, "llama") == {}
    assert carried_fields({"model_type": "llama", "eos_token_id": None}, "qwen2") == {"eos_token_id": None}
