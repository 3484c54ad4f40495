# SPDX-License-Identifier: Apache-2.0
"""Error feedback: nothing that a message loses is lost for good, in any codec."""

import pytest
import torch

from megatron_ext.outer.codecs.all_codecs import CODECS, EXACT_CODEC, build_codec
from megatron_ext.outer.error_feedback import lost_in, wanted_of


@pytest.mark.parametrize("name", CODECS.names())
def test_what_has_arrived_and_what_was_lost_are_all_that_was_wanted(name: str):
    codec = build_codec(name)
    generator = torch.Generator().manual_seed(1)
    anchor = torch.zeros(256)
    residual = torch.zeros(256)
    asked, arrived = torch.zeros(256), torch.zeros(256)
    for _ in range(8):
        values = torch.randn(256, generator=generator)
        wanted = wanted_of(anchor, values, residual)
        message = codec.decode(codec.encode(wanted), 256)
        lost_in(wanted, message, out=residual)
        asked += anchor - values
        arrived += message
    torch.testing.assert_close(arrived + residual, asked, rtol=0, atol=1e-4)
    assert name == EXACT_CODEC or residual.abs().max() > 0


def test_the_first_message_wants_the_pseudo_gradient_and_memory_is_used_where_it_is_given():
    anchor, values, memory = torch.tensor([3.0]), torch.tensor([1.0]), torch.empty(1)
    assert wanted_of(anchor, values, None, memory) is memory and memory.item() == 2.0
    assert wanted_of(anchor, values, torch.tensor([0.5])).item() == 2.5
