# SPDX-License-Identifier: Apache-2.0
"""A file of heterogeneous layers that Megatron cannot read is named, with its option."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.options import layers_file_problem
from tests.support.heterogeneous import heterogeneous


def problem_of(path: str | None, content: str | None = None) -> str | None:
    return layers_file_problem(
        SimpleNamespace(heterogeneous_layers_config_path=path, heterogeneous_layers_config_encoded_json=content)
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not JSON", "is not JSON (Expecting value: line 1 column 1 (char 0)); give the config.json"),
        ("[]", "is not a JSON object"),
        (
            '{"hidden_act": "silu", "block_configs": []}',
            "has no hidden_size, num_attention_heads, num_hidden_layers, rope_scaling, rope_theta, tie_word",
        ),
    ],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, content: str, said: str):
    file = tmp_path / "layers.json"
    file.write_text(content)
    assert f"--heterogeneous-layers-config-path {file}: {said}" in str(problem_of(str(file)))


def test_a_file_that_can_be_read_is_taken_and_none_is_needed_beside_a_checkpoint_s_copy(tmp_path: Path):
    path = heterogeneous(tmp_path)["heterogeneous_layers_config_path"]
    assert problem_of(str(path)) is None and problem_of(None) is None
    assert problem_of("/nowhere/layers.json", "{}") is None
    assert "/nowhere/layers.json: No such file or directory" in str(problem_of("/nowhere/layers.json"))
