# SPDX-License-Identifier: Apache-2.0
"""Runs of a few rounds: their options, what they lead to, and what their journals must say."""

from tests.sync_service.service import Service

DILOCO = {"outer_optimizer": "sgd", "outer_optimizer_lr": 0.7}
ROUNDS = 3
"""That peers make after the start."""

FRAGILE = {"peers": 1, "outer_optimizer": "tests.sync_service.optimizers.Fragile", "outer_optimizer_lr": 0.5}
LARGE = {"1": {"scale": 100.0}}
"""What a peer sends in round 1, at which that outer optimizer raises an error."""


def check_history(service: Service, rounds: int) -> None:
    """Check the journal: rounds one after the other, every contribution used at most once, all of members."""
    events = service.journal()
    committed = [event for event in events if event["event"] == "committed"]
    assert [event["round"] for event in committed] == list(range(rounds + 1))
    uploaded = {(event["round"], event["peer"]) for event in events if event["event"] == "uploaded"}
    for event in committed:
        assert len(set(event["contributors"])) == len(event["contributors"])
        assert all((event["round"], peer) in uploaded for peer in event["contributors"])
