# SPDX-License-Identifier: Apache-2.0
"""Switches over real processes: bit-exact, no byte too many, no copy where memory can be shared."""

import pytest
import torch

from tests.hot_switch.executions import (
    CHAINS,
    EIGHT,
    SIZES,
    added_gradients,
    counted_bytes,
    go_rounds,
    gradients_through_guests,
    into_given_tensors,
    refused,
    released,
    shared_memory,
    units_in_their_order,
    with_a_lost_peer,
)
from tests.support.distributed import run_ranks


@pytest.mark.parametrize("sizes_name", SIZES)
def test_chains_back_to_home_are_bit_exact_and_stay_so_when_values_and_memory_change(sizes_name):
    dtype = torch.float32 if sizes_name == "all packed" else torch.bfloat16
    assert run_ranks(go_rounds, 4, CHAINS, sizes_name, dtype) == [[]] * 4


def test_eight_ranks_switch_as_four_do():
    assert run_ranks(go_rounds, 8, EIGHT, "mixed, many rounds", torch.bfloat16) == [[]] * 8


def test_the_bytes_sent_are_those_of_the_plan():
    for counts in run_ranks(counted_bytes, 4, "mixed, many rounds"):
        assert len(counts) == sum(len(layouts) for _, layouts in CHAINS.values())
        assert sum(planned for _, planned in counts) > 0
        assert all(sent == planned for sent, planned in counts)


def test_what_stays_in_one_piece_shares_memory_and_the_rest_is_one_allocation():
    for rank, found in enumerate(run_ranks(shared_memory, 4)):
        assert (found["apart"], found["wrong"], found["sent"]) == ([], [], 0)
        assert found["embedding_offset"] == rank * 16 * 16 * 4  # a quarter of 64 rows of 16 fp32 elements
        # Columns, and gate and up rows, have gaps.
        assert found["copied"] == [
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
            "self_attention.linear_proj.weight",
        ]
        assert found["allocations"] == 1


def test_released_memory_is_gone_and_the_same_tensors_come_back_with_the_next_switch():
    assert run_ranks(released, 4) == [[]] * 4


def test_units_are_there_when_asked_for_and_the_rest_is_in_flight():
    assert run_ranks(units_in_their_order, 4) == [[]] * 4


def test_results_go_into_given_tensors_even_where_a_guest_shares_their_memory():
    assert run_ranks(into_given_tensors, 4) == [[]] * 4


@pytest.mark.parametrize("sizes_name", ["default", "mixed, many rounds"])
def test_gradients_of_a_guest_are_added_to_those_at_home(sizes_name):
    assert run_ranks(added_gradients, 4, sizes_name) == [[]] * 4


def test_gradients_that_go_from_guest_to_guest_arrive_bit_by_bit():
    assert run_ranks(gradients_through_guests, 4) == [[]] * 4


@pytest.mark.parametrize(
    ("case", "complaints"),
    [
        (
            "several",
            [
                "tensors to switch: 3 problems",
                "embedding.word_embeddings.weight has type torch.bfloat16, expected torch.float32",
                "decoder.final_layernorm.weight is missing",
                "output_layer.weight has shape (16, 32), expected (32, 16)",
            ],
        ),
        ("gaps", ["tensors to switch: embedding.word_embeddings.weight is not contiguous"]),
        ("out", ["tensors to switch into: decoder.final_layernorm.weight is missing"]),
        ("overlap", ["into memory of", "which it reads: give `out`"]),
        ("sizes", ["switches with direct_bytes, chunk_bytes, round_bytes, gradients = ", "give all ranks the same"]),
        ("gradients", ["gradients are added to what is there: give `out`"]),
        ("own gradients", ["the switch would write", "which it reads: give `out`"]),
        ("group", ["the plan of a switch is for 4 ranks, but the process group has 2"]),
    ],
)
def test_what_cannot_be_switched_is_named_on_every_rank(case, complaints):
    for rank_exit in run_ranks(refused, 2, case, expect_failure=True):
        assert "UserError" in rank_exit.traceback
        assert all(complaint in rank_exit.traceback for complaint in complaints), rank_exit.traceback


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_lost_peer_is_an_error_and_no_hang(how):
    first, _ = run_ranks(with_a_lost_peer, 2, how, expect_failure=True, failure_grace=1.0, timeout=60)
    assert first.exit_code == 1
    # A dead one may be noticed as soon as a message is to be sent, a silent one when it is waited for.
    assert "in switch" in first.traceback
    assert ("_advance" if how == "silent" else "executor.py") in first.traceback
