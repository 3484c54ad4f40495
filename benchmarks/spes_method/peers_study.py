# SPDX-License-Identifier: Apache-2.0
"""Study `peers`: real peers against replicas in plain PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import Case, print_table
from benchmarks.pictures import two_axes
from benchmarks.spes_method.real_peers import Compared, Comparison, compare_with_peers, largest_differences
from benchmarks.spes_method.runs import SIZES
from benchmarks.spes_method.training import Adam

__all__ = ["study_peers"]

ROUNDS = 20
INTERVAL = 10
FIRST_ROUNDS = 2
"""In which losses must be equal; rounding errors grow from then on, because experts are chosen or not."""

LEAST_DRAWN = 1e-8
"""Of a difference, on the picture's logarithmic axis."""

LOSS_GOAL = 1e-5
VALIDATION_GOAL = 3e-3


def study_peers(corpus: Path, seed: int, picture: Path) -> list[Case]:
    """Train both ways with one and with two owners, print the table, draw the picture.

    Args:
        corpus: prefix of the tokens.
        seed: of the weights and the samples.
        picture: the PNG to write.
    """
    adam = Adam(rate=4e-3, least=4e-4, warmup=2 * INTERVAL, steps=ROUNDS * INTERVAL)
    compared = {
        owners: compare_with_peers(
            Comparison(
                sizes=SIZES, adam=adam, interval=INTERVAL, corpus=corpus, owners=owners, sequences=4, seed=seed
            )
        )
        for owners in (1, 2)
    }
    print_table(*_table(compared))
    _draw(compared, picture)
    return [case for owners, each in compared.items() for case in _cases(owners, each)]


def _table(compared: Mapping[int, Compared]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = (
        *("owners", "first two rounds", "all rounds", "disturbed replicas"),
        *("validation, peers", "replicas", "difference", "disturbed"),
    )
    return head, [
        (
            str(owners),
            f"{each.differences(FIRST_ROUNDS):.1e}",
            f"{max(largest_differences(each.peers, each.replicas)):.1e}",
            f"{max(largest_differences(each.disturbed, each.replicas)):.1e}",
            f"{each.peers_validation:.5f}",
            f"{each.replicas_validation:.5f}",
            f"{100 * each.validation_difference:.3f} %",
            f"{100 * abs(each.disturbed_validation / each.replicas_validation - 1):.3f} %",
        )
        for owners, each in compared.items()
    ]


def _cases(owners: int, each: Compared) -> list[Case]:
    return [
        Case(
            case=f"loss_difference_{owners}_owners",
            value=each.differences(FIRST_ROUNDS),
            unit="nats",
            goal=LOSS_GOAL,
            direction="lower",
        ),
        Case(
            case=f"validation_difference_{owners}_owners",
            value=each.validation_difference,
            unit="ratio",
            goal=VALIDATION_GOAL,
            direction="lower",
        ),
    ]


def _draw(compared: Mapping[int, Compared], picture: Path) -> None:
    with two_axes(picture) as (losses, differences):
        for owners, each in compared.items():
            steps = range(1, len(each.peers) + 1)
            losses.plot(steps, [row[0] for row in each.peers], label=f"peer 0, owners of an expert: {owners}")
            losses.plot(steps, [row[0] for row in each.replicas], "k:", linewidth=1)
            both = ((each.peers, "-", "peers"), (each.disturbed, ":", "replicas, disturbed by 1e-7"))
            for other, style, what in both:
                largest = [max(value, LEAST_DRAWN) for value in largest_differences(other, each.replicas)]
                differences.semilogy(steps, largest, style, color=f"C{owners - 1}", label=f"{what}, owners: {owners}")
        end = FIRST_ROUNDS * INTERVAL
        differences.plot([0, end, end], [LOSS_GOAL, LOSS_GOAL, LEAST_DRAWN], "k", linewidth=1, label="goal")
        losses.set(xlabel="step", ylabel="training loss", title="Peers, and replicas in one process (dotted)")
        differences.set(xlabel="step", ylabel="largest difference to the replicas' losses")
        differences.set_title(f"Of all peers, step by step (none is drawn as {LEAST_DRAWN:.0e})")
        losses.legend()
        differences.legend()
