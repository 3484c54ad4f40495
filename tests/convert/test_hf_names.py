# SPDX-License-Identifier: Apache-2.0
"""Every row of every tensor is moved once."""

import pytest

from megatron_ext.convert.families import FAMILIES, family_named, read_config
from megatron_ext.convert.hf_names import hf_tensors, parts_of
from megatron_ext.params import gpt_parameters
from tests.convert.families.test_configs import CONFIGS


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_both_models_is_moved_once(name: str):
    family = family_named(name)
    shape = read_config(family, CONFIGS[name]).shape(divisor=64)
    for tensor in gpt_parameters(shape):
        rows = [row for part in parts_of(tensor, shape, family.names) for row in range(*part.at)]
        assert rows == list(range(tensor.shape[0] if tensor.valid_rows is None else tensor.valid_rows)), tensor.name
        assert all(
            part.rows[1] - part.rows[0] == part.at[1] - part.at[0] for part in parts_of(tensor, shape, family.names)
        )
    for tensor in hf_tensors(shape, family.names):
        rows = [row for _, part in tensor.sources for row in range(*part.rows)]
        assert rows == list(range(tensor.shape[0])), tensor.name
