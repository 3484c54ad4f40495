# SPDX-License-Identifier: Apache-2.0
"""The model finds what is wrong: each rule is violated, and says so."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.histories import SIZE, history
from tests.chaos.history import End, History, Struck
from tests.chaos.model import RULES, lost_attempts, violations
from tests.chaos.report import as_table, figures
from tests.chaos.schedule import Fault


def test_a_history_as_it_has_to_be_violates_no_rule():
    found = history()
    assert violations(found) == {}
    (lost,) = lost_attempts(found)
    assert (lost.peer, lost.round) == ("p1", 2)


def commit(found: History, number: int) -> dict:
    return next(event for event in found.journal if event["event"] == "committed" and event["round"] == number)


def a_round_is_skipped(found: History) -> None:
    found.journal.remove(commit(found, 2))


def a_peer_goes_back(found: History) -> None:
    found.said("p0", "told")[2]["round"] = 1


def a_round_is_committed_twice(found: History) -> None:
    place = found.journal.index(commit(found, 2))
    found.journal.insert(place + 1, {**commit(found, 2), "contributors": ["p0"]})


def a_contribution_is_counted_that_never_came(found: History) -> None:
    found.journal = [e for e in found.journal if (e["event"], e.get("round"), e.get("peer")) != ("uploaded", 3, "p1")]


def a_contribution_is_forgotten_in_silence(found: History) -> None:
    commit(found, 3)["contributors"].remove("p1")


def a_contribution_counts_twice_in_a_round(found: History) -> None:
    commit(found, 3)["contributors"].append("p1")


def a_peer_is_told_that_it_did_not_count(found: History) -> None:
    found.said("p2", "told")[0]["contributed"] = False


def samples_count_in_two_rounds(found: History) -> None:
    for event in found.events("uploaded"):
        if event["peer"] == "p2" and event["round"] == 3:
            event["progress"][1] -= SIZE


def a_fault_costs_two_intervals(found: History) -> None:
    found.peers["p1"].insert(3, {"event": "begins", "at": 0.96, "round": 2, "begin": SIZE})


def an_interval_is_lost_long_after_the_fault(found: History) -> None:
    found.peers["p1"] = [entry for entry in found.peers["p1"] if entry["at"] != 1.1]
    found.peers["p1"].insert(-1, {"event": "begins", "at": 4.06, "round": 5, "begin": 3 * SIZE})


def a_peer_has_other_values(found: History) -> None:
    found.said("p2", "told")[1]["digest"] = "0" * 8


def peers_end_apart(found: History) -> None:
    found.said("p2", "ends")[0]["round"] = 3
    found.said("p2", "ends")[0]["digest"] = commit(found, 3)["digest"]


def jobs_end_with_other_models(found: History) -> None:
    for name in found.names:
        found.said(name, "ends")[0]["model"] = name


def a_round_has_other_values_than_what_counted(found: History) -> None:
    number = commit(found, 3)["digest"]
    commit(found, 3)["digest"] = "0" * 8
    for peer in found.names:
        for entry in found.said(peer, "told"):
            if entry["digest"] == number:
                entry["digest"] = "0" * 8


def flipped(outcome: str) -> Callable[[History], None]:
    def change(found: History) -> None:
        fault = Fault(kind="bit flip in the snapshot", at=2.0, seconds=0.1, target="server", dice=0)
        found.struck.append(Struck(fault=fault, begun=2.0, ended=2.1, outcome=outcome))

    return change


def a_peer_ends_by_itself(found: History) -> None:
    found.ends.append(End(who="p2", at=2.5, code=2, said="no more"))


def the_server_ends_at_a_damaged_frame(found: History) -> None:
    fault = Fault(kind="corrupt frames up", at=2.0, seconds=0.1, target="p1", dice=0)
    found.struck.append(Struck(fault=fault, begun=2.0, ended=2.1))
    found.ends.append(End(who="server", at=2.1, code=1, said="no more"))


def the_run_is_stuck(found: History) -> None:
    found.stuck = "the end of all peers has not come"


def the_loss_is_too_high(found: History) -> None:
    found.loss *= 1.04


def the_loss_is_not_a_number(found: History) -> None:
    found.loss = float("nan")


WRONG: list[tuple[Callable[[History], None], str, str]] = [
    (a_round_is_skipped, "rounds increase", "round 3 was committed after round 1"),
    (a_peer_goes_back, "rounds increase", "peer p0 went back from round 2 to 1"),
    (a_round_is_committed_twice, "one commit per round", "round 2 was committed twice"),
    (a_contribution_is_counted_that_never_came, "contributions count once", "of peer p1 that the journal does not"),
    (a_contribution_is_forgotten_in_silence, "contributions count once", "p1 had contributed to round 3 is in no"),
    (a_contribution_counts_twice_in_a_round, "contributions count once", "round 3 counts a peer twice"),
    (a_peer_is_told_that_it_did_not_count, "contributions count once", "for round 1 did not count, which is wrong"),
    (samples_count_in_two_rounds, "samples count once", "peer p2: samples 32 to 64 of its part"),
    (a_fault_costs_two_intervals, "a fault costs a peer one interval", "peer p1 lost an interval for round 2"),
    (an_interval_is_lost_long_after_the_fault, "a fault costs a peer one interval", "for round 5"),
    (a_peer_has_other_values, "survivors are equal", "peer p2 had other values than round 2"),
    (peers_end_apart, "survivors are equal", "peers ended at different rounds"),
    (jobs_end_with_other_models, "survivors are equal", "peers ended with different models"),
    (a_round_has_other_values_than_what_counted, "values follow from what counted", "round 3 has other values"),
    (flipped(""), "bit flips are found", "nobody has found it"),
    (flipped("refused; it could not be rebuilt: why"), "bit flips are found", "could not be rebuilt"),
    (a_peer_ends_by_itself, "processes stay", "p2 ended by itself with status 2: no more"),
    (the_server_ends_at_a_damaged_frame, "processes stay", "server ended by itself"),
    (the_run_is_stuck, "all is well again", "the end of all peers"),
    (the_loss_is_too_high, "the loss is that of a faultless run", "from that of a run without faults"),
    (the_loss_is_not_a_number, "the loss is that of a faultless run", "the final loss nan"),
]


@pytest.mark.parametrize(("change", "rule", "said"), WRONG, ids=[change.__name__ for change, *_ in WRONG])
def test_what_is_wrong_is_found_by_name(change: Callable[[History], None], rule: str, said: str):
    found = history()
    change(found)
    assert any(said in sentence for sentence in violations(found).get(rule, [])), violations(found)


def test_every_rule_is_violated_once():
    assert {rule for _, rule, _ in WRONG} == set(RULES)


@pytest.mark.parametrize("outcome", ["refused; the journal was rebuilt", "refused; restored from a copy"])
def test_a_rebuilt_journal_explains_a_peer_that_ends_and_a_restored_file_does_not(outcome: str):
    found = history()
    flipped(outcome)(found)
    found.ends.append(End(who="p2", at=2.05, code=2, said="not a member"))
    assert list(violations(found)) == ([] if "rebuilt" in outcome else ["processes stay"])


def test_the_line_that_a_rebuilt_journal_repeats_ends_no_recovery():
    found = history()
    flipped("refused; the journal was rebuilt")(found)
    (struck,) = (struck for struck in found.struck if struck.outcome)
    again = [event for event in found.events("committed") if event["seen"] <= struck.ended][-1]
    recovered = found.recovered(struck)
    found.journal.append({**again, "contributors": found.names, "seen": struck.ended + 0.01})
    found.journal.sort(key=lambda event: event["seen"])
    assert found.recovered(struck) == recovered > struck.ended + 0.01


@pytest.mark.parametrize(
    "said",
    ["dir x: it cannot be used: File too large", "x/journal.jsonl cannot be used: the disk is full", "KeyError: 3"],
    ids=["no file", "part of a line", "another end"],
)
def test_a_full_disk_explains_a_server_that_refuses_it_when_it_starts_and_no_other_end(said: str):
    found = history()
    fault = Fault(kind="full disk", at=2.0, seconds=0.1, target="server", dice=0)
    found.struck.append(Struck(fault=fault, begun=2.0, ended=2.1))
    found.ends.append(End(who="server", at=2.05, code=2, said=said))
    assert list(violations(found)) == ([] if "cannot be used" in said else ["processes stay"])


def test_the_figures_say_how_much_was_lost_and_how_long_it_took_to_recover():
    found = figures(history())
    assert (found["intervals"], found["intervals_lost"], found["goodput"]) == (12, 1, 0.9167)
    # The peer was there again at 1.7 s, and round 3 is the first one in which all count since.
    assert found["recovery_seconds"] == {"peer killed": {"faults": 1, "median": 1.3, "worst": 1.3, "all": [1.3]}}
    assert found["median_recovery_seconds"] == 1.3
    # 11 contributions in 4 s, and 3 in each of the two seconds in which nothing was wrong.
    assert found["goodput_in_time"] == 0.9167
    table = as_table(found)
    assert "goodput 91.67% (1 of 12 intervals lost), in time 91.7%, loss" in table and "violations: none" in table


def test_rounds_that_wait_for_a_server_are_late_though_none_of_their_intervals_is_lost():
    found = history()
    for event in found.journal:
        event["seen"] += 6.0 * (event["seen"] > 2.5)  # the rest of the run comes six seconds later
    found.struck = [Struck(fault=replace(found.struck[0].fault, target="server"), begun=2.2, ended=8.0)]
    # 11 contributions in 10 s; quiet are those of rounds 1, 2 and 4, 8 in 3 s.
    assert figures(found)["goodput_in_time"] == round(1.1 / (8 / 3), 4)


def test_without_a_quiet_second_the_goodput_in_time_is_unknown():
    found = history()
    found.struck = [replace(found.struck[0], begun=-1.0, ended=3.5)]
    assert figures(found)["goodput_in_time"] is None
    assert "in time unknown" in as_table(figures(found))


def test_the_goodput_in_time_of_jobs_is_against_their_second_run_also_where_no_second_is_quiet():
    found, other = history(), history()
    found.struck = [replace(found.struck[0], begun=-1.0, ended=3.5)]
    other.struck = []
    commit(other, 2)["contributors"] = found.names
    for event in other.journal:
        event["seen"] /= 2
    found.faultless = other
    # 11 contributions in 4 s, and 12 in 2 s without the fault.
    assert figures(found)["goodput_in_time"] == round(11 / 4 / (12 / 2), 4)
    assert "in time 45.8%" in as_table(figures(found))


def test_of_jobs_whose_second_run_has_no_round_the_goodput_in_time_is_unknown():
    found = history()
    found.faultless = History(settings=found.settings)
    assert figures(found)["goodput_in_time"] is None


def test_a_violation_is_in_the_table():
    found = history()
    found.struck[0] = replace(found.struck[0], begun=4.5, ended=4.6)
    assert "VIOLATION of 'a fault costs a peer one interval': peer p1 lost" in as_table(figures(found))
