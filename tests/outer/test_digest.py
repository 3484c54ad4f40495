# SPDX-License-Identifier: Apache-2.0
"""The digest tells tensors apart by any bit and any order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.outer.digest import tensor_digest

VALUES = st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40)


@given(VALUES, st.data())
def test_a_changed_value_changes_the_digest(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    other = tensor.clone()
    index = data.draw(st.integers(0, len(values) - 1))
    other.view(torch.int32)[index] ^= 1 << data.draw(st.integers(0, 30))
    assert tensor_digest([tensor]) != tensor_digest([other])


@given(VALUES, st.data())
def test_swapped_values_change_the_digest(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    first, second = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, len(values) - 1))
    other = tensor.clone()
    other[first], other[second] = tensor[second], tensor[first]
    same = torch.equal(tensor.view(torch.int32), other.view(torch.int32))
    assert (tensor_digest([tensor]) == tensor_digest([other])) == same


def test_negative_zero_is_not_zero():
    assert tensor_digest([torch.tensor([0.0])]) != tensor_digest([torch.tensor([-0.0])])
