# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo: fragments, staggered rounds, delay and mixing."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.local_sgd import LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
from megatron_ext.local_sgd.streaming import assign_fragments, due_steps
from tests.local_sgd.engines import engine_of, start_groups
from tests.support.distributed import run_ranks

MODELS = st.builds(
    lambda layers, tied: (
        ["embedding", *(f"layer.{index}" for index in range(layers)), "final_norm"] + ([] if tied else ["output_layer"])
    ),
    st.integers(1, 40),
    st.booleans(),
)


@given(MODELS, st.sampled_from(["strided", "sequential"]), st.data())
def test_every_unit_is_in_one_fragment_and_every_fragment_has_a_layer(units, pattern, data):
    layers = [unit for unit in units if unit.startswith("layer")]
    count = data.draw(st.integers(1, len(layers)))
    fragments = assign_fragments(units, count, pattern)
    assert sorted(unit for fragment in fragments for unit in fragment) == sorted(units)
    sizes = [sum(unit in layers for unit in fragment) for fragment in fragments]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    for fragment in fragments:
        assert list(fragment) == [unit for unit in units if unit in fragment]


def test_units_are_assigned_in_a_time_that_grows_with_their_number():
    units = [f"decoder.layers.{index}" for index in range(100_000)]
    began = time.process_time()
    assert sum(map(len, assign_fragments(units, 10, "strided"))) == len(units)
    assert time.process_time() - began < 5  # half a second; with all later units looked at for each, half a minute


def test_patterns_take_every_nth_layer_or_neighbours():
    units = ["embedding", "layer.0", "layer.1", "layer.2", "layer.3", "final_norm", "output_layer"]
    assert assign_fragments(units, 2, "strided") == [
        ("embedding", "layer.0", "layer.2"),
        ("layer.1", "layer.3", "final_norm", "output_layer"),
    ]
    assert assign_fragments(units, 2, "sequential") == [
        ("embedding", "layer.0", "layer.1"),
        ("layer.2", "layer.3", "final_norm", "output_layer"),
    ]
    with pytest.raises(ValueError, match="5 fragments of 4 layers"):
        assign_fragments(units, 5, "strided")


@given(st.integers(1, 20), st.integers(1, 100))
def test_rounds_begin_within_the_interval_and_are_spread_over_it(count, interval):
    steps = due_steps(count, interval)
    assert steps[-1] == interval
    assert all(1 <= step <= interval for step in steps)
    gaps = [later - earlier for earlier, later in zip([0, *steps], steps, strict=False)]
    assert max(gaps) <= -(-interval // count)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"fragments": 0}, "--local-sgd-fragments"),
        ({"sync_delay": 4}, "--local-sgd-fragment-sync-delay"),
        ({"sync_delay": -1}, "--local-sgd-fragment-sync-delay"),
        ({"update_alpha": 1.1}, "--local-sgd-fragment-update-alpha"),
        ({"update_alpha": float("nan")}, "--local-sgd-fragment-update-alpha"),
        ({"pattern": "sequential"}, "--local-sgd-fragment-pattern"),
    ],
)
def test_a_bad_value_is_named_by_its_flag(fields, flag):
    config = LocalSGDConfig(use_local_sgd=True, local_sgd_workers=2, local_sgd_sync_interval=4)
    (problem,) = StreamingConfig(**fields).problems(config, OuterOptimizerConfig())
    assert problem.startswith(flag)


# Rounds over processes. Every layer is one number; worker w moves layer l by (w + 1) * (l + 1) * step in every step.

LAYERS, INTERVAL, STEPS = 3, 6, 20
UNITS = [f"layer.{index}" for index in range(LAYERS)]
LR, MOMENTUM = 0.7, 0.9


def move(worker, layer, step):
    return (worker + 1) * (layer + 1) * (1 + step % 5) / 16


def streamed(streaming, penalty=None):
    """Return this worker's values after every step, and (step, fragment, units) of every round."""
    values = [torch.zeros(1) for _ in UNITS]
    engine = engine_of(
        values,
        interval=INTERVAL,
        units=UNITS,
        streaming=streaming,
        penalty=penalty,
        outer_optimizer_lr=LR,
        outer_optimizer_momentum=MOMENTUM,
    )
    engine.take_anchor()
    trace, rounds = [], []
    for step in range(STEPS):
        for layer, value in enumerate(values):
            value += move(dist.get_rank(), layer, step)
        if engine.count_step():
            for report in engine.advance().reports:
                rounds.append((step + 1, report.fragment, list(report.unit_norms)))
        trace.append([float(value) for value in values])
    return trace, rounds


def by_hand(workers, fragments, due, delay, alpha):
    """Return every worker's values after every step, layer by layer in plain arithmetic."""
    values = [[0.0] * LAYERS for _ in range(workers)]
    anchor, momentum = [0.0] * LAYERS, [0.0] * LAYERS
    sent = {}
    traces = [[] for _ in range(workers)]
    for step in range(STEPS):
        for worker in range(workers):
            for layer in range(LAYERS):
                values[worker][layer] += move(worker, layer, step)
        for fragment, layers in enumerate(fragments):
            if step % INTERVAL + 1 == due[fragment]:
                for layer in layers:
                    sent[layer] = (step + delay, [anchor[layer] - own[layer] for own in values])
        for layer, (end, gradients) in list(sent.items()):
            if end == step:
                gradient = sum(gradients) / workers
                momentum[layer] = MOMENTUM * momentum[layer] + gradient
                anchor[layer] -= LR * (gradient + MOMENTUM * momentum[layer])
                for own in values:
                    own[layer] = alpha * own[layer] + (1 - alpha) * anchor[layer]
                del sent[layer]
        for worker in range(workers):
            traces[worker].append(list(values[worker]))
    return traces


@pytest.mark.parametrize(
    ("fragments", "delay", "alpha", "guard"),
    [
        (1, 0, 0.0, None),
        (1, 5, 0.5, None),
        (2, 0, 0.0, None),
        (2, 1, 0.5, None),
        (3, 2, 0.0, None),
        (3, 3, 1.0, None),
        (3, 4, 0.25, {"clip_pseudo_grad": 1e6}),
    ],
)
def test_values_follow_the_algorithm_by_hand(fragments, delay, alpha, guard):
    streaming = {"fragments": fragments, "sync_delay": delay, "update_alpha": alpha}
    results = run_ranks(streamed, 2, streaming, guard)
    members = {1: [[0, 1, 2]], 2: [[0, 2], [1]], 3: [[0], [1], [2]]}[fragments]
    expected = by_hand(2, members, due_steps(fragments, INTERVAL), delay, alpha)
    for worker, (trace, _) in enumerate(results):
        for step, (found, right) in enumerate(zip(trace, expected[worker], strict=True)):
            assert found == pytest.approx(right, rel=1e-4), (worker, step)


def test_every_unit_has_one_round_per_interval():
    for _, rounds in run_ranks(streamed, 2, {"fragments": 3, "sync_delay": 1}):
        assert [(step, fragment) for step, fragment, _ in rounds] == [
            (end + begin + 1, fragment) for end in (0, 6, 12) for fragment, begin in enumerate((2, 4, 6))
        ]
        for start in (0, 3, 6):
            assert sorted(unit for _, _, units in rounds[start : start + 3] for unit in units) == UNITS


def finished(streaming, non_finite):
    """Return the values before and after the end, the anchors and the momentum there, and the reports."""
    values = [torch.zeros(4), torch.zeros(4)]
    penalty = {"skip_anomaly": True} if non_finite else None
    engine = engine_of(values, units=["layer.0", "layer.1"], interval=4, streaming=streaming, penalty=penalty)
    engine.take_anchor()
    for _ in range(9):
        for value in values:
            value += dist.get_rank() + 1.0
        if engine.count_step():
            engine.advance()
    if non_finite and dist.get_rank() == 1:
        values[0][2] = float("nan")
    before = [value.tolist() for value in values]
    momentum = [value.tolist() for value in engine.tensor_state()["momentum_buffer"]]
    reports = engine.finish().reports
    state = engine.tensor_state()
    anchors, kept = ([value.tolist() for value in state[name]] for name in ("anchor", "momentum_buffer"))
    return before, [value.tolist() for value in values], anchors, momentum == kept, len(reports), engine.synced


@pytest.mark.parametrize("non_finite", [False, True])
def test_the_end_makes_workers_equal_without_an_outer_step(non_finite):
    results = run_ranks(finished, 2, {"fragments": 2}, non_finite)
    (first, *ended), (second, *same) = results
    assert ended == same
    values, anchors, momentum_is_kept, reports, synced = ended
    mean = [[(left + right) / 2 for left, right in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    if non_finite:  # in its first fragment, in which the other counts alone
        mean[0] = first[0]
    assert values == anchors == mean
    assert (momentum_is_kept, reports, synced) == (True, 0, True)


SIZES = [(30, 70), (7,), (400,), (64,)]
MIXED = ["layer.0", "layer.0", "layer.1", "layer.2"]
GUARD = {"skip_anomaly": True, "ewma_warmup_steps": 2, "ewma_alpha": 0.5, "pseudo_gradnorm_reduce": True}


def stepped(values, generator):
    for value in values:
        value += torch.randn(value.shape, generator=generator)


def continued(streaming, penalty):
    """Return values of a straight run, and for every step of it those of one that was saved and loaded there."""
    groups = start_groups()
    options = {"units": MIXED, "groups": groups, "interval": 4, "streaming": streaming, "penalty": penalty}

    def run(saved_at):
        values = [torch.zeros(size) for size in SIZES]
        engine = engine_of(values, **options)
        engine.take_anchor()
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(11):
            stepped(values, generator)
            if engine.count_step():
                engine.advance()
            if step == saved_at:
                state = (engine.tensor_state(), engine.scalar_state(), engine.worker_state())
                state = ({name: [value.clone() for value in held] for name, held in state[0].items()}, *state[1:])
                engine = engine_of(values, **options)
                engine.load(*state)
        equal = engine.synced
        engine.sync()
        return [value.tolist() for value in values], equal, engine.synced

    straight = run(None)
    return straight, [run(step) for step in range(4, 9)]


@pytest.mark.parametrize(
    ("streaming", "penalty"),
    [
        ({"fragments": 2, "sync_delay": 3, "update_alpha": 0.5}, {}),
        ({"fragments": 3, "sync_delay": 2}, GUARD),
        ({"fragments": 3, "sync_delay": 1, "update_alpha": 0.25}, {"codec": "int4"}),
    ],
    ids=["plain", "guarded", "codec"],
)
def test_a_state_saved_at_any_step_continues_bit_for_bit_with_rounds_in_flight(streaming, penalty):
    results = run_ranks(continued, 2, streaming, penalty)
    for straight, resumed in results:
        assert straight[1:] == (False, True)
        assert all(run == straight for run in resumed)
    assert results[0][0] == results[1][0]  # the last round has made the workers equal


def non_finite_once():
    """Return whether values are finite at every step when worker 1 breaks while it keeps half of its own values."""
    values = [torch.zeros(500), torch.zeros(500)]
    streaming = {"fragments": 2, "sync_delay": 2, "update_alpha": 0.5}
    engine = engine_of(values, units=["layer.0", "layer.1"], interval=4, streaming=streaming, penalty=GUARD)
    engine.take_anchor()
    generator = torch.Generator().manual_seed(dist.get_rank())
    finite, healed = [], []
    for step in range(24):
        stepped(values, generator)
        if step == 12 and dist.get_rank() == 1:
            for value in values:
                value[3] = float("nan")
        if engine.count_step() and engine.advance().healed:
            healed.append(step)
        finite.append(all(bool(torch.isfinite(value).all()) for value in values))
    return finite, healed


def test_a_worker_that_breaks_takes_the_common_values_and_no_one_else_notices():
    (first, nothing), (second, healed) = run_ranks(non_finite_once, 2)
    assert all(first)
    assert not nothing
    assert not second[12]
    assert all(second[17:])
    assert healed == [15, 17]


def reports_around_a_save():
    """Return the rounds that are reported before a save that turns one in flight, by the save, and after a resume."""
    values = [torch.zeros(20), torch.zeros(20)]
    settings = {
        "units": ["layer.0", "layer.1"],
        "interval": 8,
        "streaming": {"fragments": 2, "sync_delay": 3},
        "groups": start_groups(),
    }
    engine = engine_of(values, **settings)
    engine.take_anchor()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def steps(engine, values, count):
        found = []
        for _ in range(count):
            stepped(values, generator)
            if engine.count_step():
                found += [report.round for report in engine.advance().reports]
        return found

    before = steps(engine, values, 5)
    saved = engine.tensor_state(), engine.scalar_state(), engine.worker_state()
    by_save = [report.round for report in engine.collect().reports]
    values = [value.clone() for value in values]
    again = engine_of(values, **settings)
    again.load(*saved)
    return before, by_save, steps(again, values, 12)


def test_a_round_that_a_save_turns_is_reported_once():
    assert run_ranks(reports_around_a_save, 2) == [([], [1], [2, 3])] * 2


def messages_of_observed_rounds(codec):
    """Return what workers send in the steps of an interval whose round has a delay of 2, and is measured for a log."""
    groups, sent = start_groups(), []

    def told(name, function):
        def call(*given, **named):
            sent[-1].append(name)
            return function(*given, **named)

        return call

    value = torch.zeros(6)
    streaming = {"sync_delay": 2, "update_alpha": 0.5}
    engine = engine_of(
        [value], interval=4, groups=groups, penalty={"codec": codec}, streaming=streaming, observe=True
    )
    engine.take_anchor()
    dist.batch_isend_irecv = told("values", dist.batch_isend_irecv)
    dist.all_reduce, dist.broadcast = told("sum", dist.all_reduce), told("sum", dist.broadcast)
    cosines = []
    for _ in range(12):
        value += 1.0 + dist.get_rank()
        sent.append([])
        if engine.count_step():
            cosines += [report.cosine for report in engine.advance().reports]
    return sent[-4:], cosines


@pytest.mark.parametrize("codec", [None, "int8"])
def test_nothing_that_training_waits_for_is_sent_behind_results_that_travel(codec):
    for sent, cosines in run_ranks(messages_of_observed_rounds, 2, codec):
        turn, *others = sent
        assert turn[-1] == "values"
        assert turn.count("values") == 1
        assert [message for step in others for message in step] == ["values"]  # the next round's
        # Both rounds go the same way, the second one with a momentum to compare with.
        assert cosines[-1] == pytest.approx(1.0)
