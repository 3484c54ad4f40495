# SPDX-License-Identifier: Apache-2.0
"""What a round says of the workers that it left out."""

import dataclasses

from megatron_ext.local_sgd.reporting.round_report import RoundReport


def report(rejected):
    return RoundReport(
        round=7,
        fragment=0,
        worker_steps=None,
        pseudo_gradient_norm=1.0,
        unit_norms={},
        worker_norms=[1.0, 1.0, 1.0],
        rejected=rejected,
        reasons={},
        weights={},
        clipped={},
        cosine=None,
        bytes_sent=0,
        seconds=0.0,
        waiting_seconds=0.0,
        applying_seconds=0.0,
    )


def remarks(rejected):
    return report(rejected).remarks()


def test_a_round_without_anomalies_has_nothing_to_say():
    assert remarks({}) == []


def test_units_that_lost_the_same_workers_share_a_sentence():
    assert remarks({"layer.0": [1], "layer.1": [0, 2], "layer.4": [1]}) == [
        "outer round 7: left out worker 1, anomalous in layer.0, layer.4",
        "outer round 7: left out workers 0, 2, anomalous in layer.1",
    ]


def test_the_first_unit_of_a_sentence_tells_why():
    found = dataclasses.replace(
        report({"layer.1": [0, 2], "layer.4": [0, 2]}),
        reasons={"layer.1": ["too long", "non-finite"], "layer.4": ["much too long", "non-finite"]},
    )
    assert found.remarks() == [
        "outer round 7: left out workers 0, 2, anomalous in layer.1, layer.4 "
        "(worker 0, layer.1: too long; worker 2, layer.1: non-finite)",
    ]


def test_workers_without_steps_do_not_count():
    found = dataclasses.replace(report({"layer.0": [0, 2], "layer.1": [0]}), worker_steps=[3, 0, 5])
    assert found.skipped_units == ["layer.0"]
    assert found.remarks() == [
        "outer round 7: all workers were anomalous in layer.0, which went back to the anchor",
        "outer round 7: left out worker 0, anomalous in layer.1",
    ]


def test_a_unit_that_lost_all_workers_is_said_to_have_gone_back():
    assert remarks({"layer.0": [0, 1, 2]}) == [
        "outer round 7: all workers were anomalous in layer.0, which went back to the anchor"
    ]


def test_units_that_lost_all_workers_count_as_skipped():
    assert report({"layer.0": [0, 1, 2], "layer.1": [0, 2]}).skipped_units == ["layer.0"]


def test_who_debugs_is_told_all_norms_and_what_was_clipped():
    round_seven = dataclasses.replace(report({"layer.0": [1]}), clipped={"layer.1": 0.25})
    assert round_seven.remarks(debug=True) == [
        "outer round 7: left out worker 1, anomalous in layer.0",
        "outer round 7: the workers' norms were 1, 1, 1",
        "outer round 7: clipped layer.1 to 0.25 of its norm",
    ]


def test_many_units_are_counted_instead_of_named():
    (said,) = remarks({f"layer.{number}": [1] for number in range(9)})
    assert said.endswith("layer.0, layer.1, layer.2, layer.3, layer.4 and 4 more units")


def test_new_levels_are_one_line_with_units_workers_and_both_levels():
    found = dataclasses.replace(
        report({"layer.1": [0, 1, 2]}),
        new_levels={"layer.1": {0: (1.0, 2.0), 2: (2.0, 4.0)}, "layer.4": {1: (0.5, 0.75)}},
        lasting=["worker 1 has been left out for 10 rounds running"],
    )
    assert found.remarks()[1:] == [
        "outer round 7: learned a new level of norms, which most workers share, in layer.1 (1.5 -> 3, workers 0, 2), "
        "layer.4 (0.5 -> 0.75, worker 1)",
        "outer round 7: worker 1 has been left out for 10 rounds running",
    ]
