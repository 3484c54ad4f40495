# SPDX-License-Identifier: Apache-2.0
"""Nothing that changes what a model computes is dropped without a word."""

from dataclasses import fields

from megatron_ext.convert.counterparts import NOT_OF_THE_MODEL, ONLY
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.options import ROWS


def test_every_option_that_peers_must_share_is_carried_or_has_one_value_or_is_not_of_the_model():
    shared = {row.peers_share for row in ROWS if isinstance(row.peers_share, str) and row.peers_share}
    carried = {entry.name for entry in fields(ModelSettings)}
    assert len(shared) > 40
    assert shared - carried - ONLY.keys() - NOT_OF_THE_MODEL == set()
    assert not carried & ONLY.keys() and not NOT_OF_THE_MODEL & (carried | ONLY.keys())
