# SPDX-License-Identifier: Apache-2.0
"""Jobs that would spoil each other's model or data do not agree."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.options import ROWS
from megatron_ext.sync_service.megatron.job_agreement import agreed, telling_padding
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.handshake import check_against
from tests.support.distributed import run_ranks

SHARED = {row.option: row.peers_share for row in ROWS if isinstance(row.peers_share, str) and row.peers_share}
"""Options that peers have in common, with their arguments."""

OPTIONS: dict[str, Any] = {
    **dict.fromkeys(SHARED.values()),
    "experimental_attention_variant": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "sync_service_interval": 4,
    "sync_service_interval_seconds": None,
    "seed": 1234,
    "seq_length": 32,
    "split": None,
    "dataloader_type": "single",
    "train_iters": 8,
    "train_samples": None,
    "global_batch_size": 4,
    "padded_vocab_size": 128,
    "hot_switch_strategies": None,
    "hot_switch_strategy_file": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"sync_service_interval": 5},
        {"sync_service_interval": None, "sync_service_interval_seconds": 5.0},
        {"seed": 1},
        {"seq_length": 64},
        {"split": "1,0,0"},
        {"dataloader_type": "cyclic"},
        {"train_iters": 9},
        {"global_batch_size": 8},
        {"padded_vocab_size": 256},
        {"hot_switch_strategies": ["1,1,1"]},
        {"hot_switch_strategy_file": "strategies.yaml"},
        {"rotary_base": 500000},
        {"moe_router_topk": 1},
        {"moe_mlp_glu_interleave_size": 4},
        {"eod_mask_loss": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_peers_agree_on_the_interval_the_samples_and_what_the_model_computes(change: dict[str, Any]):
    one, other = agreed(SimpleNamespace(**OPTIONS)), agreed(SimpleNamespace(**{**OPTIONS, **change}))
    assert [field for field in one if one[field] != other[field]] != []
    assert agreed(SimpleNamespace(**{**OPTIONS, "train_iters": 4, "global_batch_size": 8})) == one


@pytest.mark.parametrize(
    ("change", "tp", "way_out"),
    [
        ({"padded_vocab_size": 512}, 1, "with TP 1, --make-vocab-size-divisible-by 384 makes them 384)"),
        ({"padded_vocab_size": 512}, 2, "with TP 2, --make-vocab-size-divisible-by 192 makes them 384)"),
        ({"padded_vocab_size": 640}, 5, "TP 5 cannot hold 384 rows in equal parts; choose another TP)"),
        ({"seed": 1}, 2, "or begin a run under another name"),
    ],
)
def test_a_peer_whose_vocabulary_is_padded_otherwise_is_told_the_option_that_makes_it_the_runs(
    change: dict[str, Any], tp: int, way_out: str
):
    run = agreed(SimpleNamespace(**{**OPTIONS, "padded_vocab_size": 384}))
    options = {**OPTIONS, "padded_vocab_size": 384, "tensor_model_parallel_size": tp, **change}
    peer, catalog = SimpleNamespace(**options), Catalog([TensorSpec(name="w", shape=(1,))])
    with pytest.raises(UserError) as refused, telling_padding(peer):
        try:
            check_against(run, catalog, "b", agreed(peer), catalog)
        except Refusal as refusal:
            raise UserError(f"the server refuses: {refusal}") from refusal
    assert str(refused.value).endswith(way_out)


def options_of_arguments() -> dict[str, list[str]]:
    """Megatron's arguments, and the options that set each."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        found.setdefault(action.dest, []).extend(action.option_strings)
    return found


def test_every_option_that_peers_share_is_one_of_megatrons():
    (found,) = run_ranks(options_of_arguments, 1)
    # The vocabulary's size with its padding is Megatron's, made of several options.
    named = {option: name for option, name in SHARED.items() if name != "padded_vocab_size"}
    assert len(named) > 60
    assert {option: name for option, name in named.items() if option not in found.get(name, [])} == {}
