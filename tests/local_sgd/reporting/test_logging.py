# SPDX-License-Identifier: Apache-2.0
"""The iteration line, TensorBoard and the timers carry our fields after Megatron's own."""

import re

import pytest

from tests.local_sgd.runs import arguments, local_run, worker_slices
from tests.support.pretrain import run_pretrain


def lines(ranks):
    """Return the iteration lines."""
    return [line for line in ranks[-1].stdout.splitlines() if " iteration " in line and "|" in line]


def test_our_fields_follow_megatrons_on_the_iteration_line():
    ranks = local_run("single", "fp32", workers=2, train_iters=4, local_sgd_sync_interval=2)
    last = lines(ranks)[-1]
    assert last.index("number of nan iterations") < last.index("outer round: 2 |")
    assert last.rstrip().endswith("| workers: 2/2 |")
    assert "pseudo-grad norm: " in last


def test_the_printed_loss_is_the_mean_over_workers():
    ranks = local_run("single", "fp32", workers=2, train_iters=4, local_sgd_sync_interval=100, log_interval=2)
    printed = [float(line.split("lm loss: ")[1].split(" ")[0]) for line in lines(ranks)]
    losses = [part[-1].losses for part in worker_slices(ranks, "single", 2)]
    means = [sum(values) / 2 for values in zip(*losses, strict=True)]
    assert printed == pytest.approx([means[0], sum(means[0:2]) / 2, sum(means[2:4]) / 2], rel=1e-5)


def test_tensorboard_has_our_keys_and_their_twins(tmp_path):
    pytest.importorskip("tensorboard", reason="part of the extra 'tests'")
    run_pretrain(
        arguments(
            "single",
            "fp32",
            workers=2,
            train_iters=4,
            local_sgd_sync_interval=2,
            local_sgd_skip_anomaly=True,
            local_sgd_pseudo_gradnorm_reduce=True,
            tensorboard_dir=str(tmp_path),
        ),
        2,
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    keys = set(events.Tags()["scalars"])
    for name in (
        *("round", "pseudo-grad-norm", "bytes", "cosine", "rejected", "skipped-units"),
        *("weight of worker 0", "weight of worker 1"),
        *("sync-seconds", "waiting-seconds", "sending-seconds", "applying-seconds"),
    ):
        assert {f"local-sgd/{name}", f"local-sgd/{name} vs samples"} <= keys
    value = {key: [event.value for event in events.Scalars(key)] for key in keys}
    first, second = value["local-sgd/weight of worker 0"], value["local-sgd/weight of worker 1"]
    assert [left + right for left, right in zip(first, second, strict=True)] == pytest.approx([1.0, 1.0])
    assert first[0] != second[0]
    parts = [value[f"local-sgd/{part}-seconds"] for part in ("waiting", "sending", "applying")]
    assert [sum(part) for part in zip(*parts, strict=True)] == pytest.approx(value["local-sgd/sync-seconds"])
    assert [event.step for event in events.Scalars("local-sgd/round")] == [2, 4]
    assert {"lm loss", "lm loss vs samples"} <= keys


def test_tensorboard_has_all_rounds_since_it_was_written_to(tmp_path):
    pytest.importorskip("tensorboard", reason="part of the extra 'tests'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for interval in (1, 4):
        directory = tmp_path / str(interval)
        options = {"local_sgd_fragments": 2, "train_iters": 8, "local_sgd_sync_interval": 4}
        options |= {"tensorboard_dir": str(directory), "tensorboard_log_interval": interval}
        run_pretrain(arguments("single", "fp32", workers=2, **options), 2)
        events = EventAccumulator(str(directory)).Reload()
        found.append([(event.step, event.value) for event in events.Scalars("local-sgd/bytes")])
    apart, together = found
    assert [step for step, _ in apart][:3] == [2, 4, 6]
    assert together[0] == (4, apart[0][1] + apart[1][1])


def held_bytes(model, optimizer, args):
    buffers = [buffer for chunk in model for buffer in chunk.buffers]
    return sum(buffer.grad_data.nbytes for buffer in buffers), sum(buffer.param_data.nbytes for buffer in buffers)


def test_what_is_sent_inside_a_worker_is_told_beside_what_crosses_workers(tmp_path):
    pytest.importorskip("tensorboard", reason="part of the extra 'tests'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"train_iters": 5, "local_sgd_sync_interval": 2, "local_sgd_warmup_steps": 1}
    run = arguments("dp2", "bf16-distopt", workers=2, **options, tensorboard_dir=str(tmp_path))
    gradients, parameters = run_pretrain(run, 4, probe=held_bytes)[-1].record.probe
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("local-sgd/bytes-inside")
    # Each of two ranks sends one half of the gradients, and its half of the parameters; the first has warm-up's, too.
    in_a_step = gradients // 2 + parameters // 2
    assert [(event.step, event.value) for event in events] == [(3, 3 * in_a_step), (5, 2 * in_a_step)]


@pytest.mark.parametrize("option", ["minmax", "max", "all"])
def test_the_outer_sync_timer_is_listed_with_megatrons(option):
    timing = {"timing_log_level": 2, "timing_log_option": option}
    ranks = local_run("dp2", "bf16-distopt", workers=2, train_iters=4, local_sgd_sync_interval=2, **timing)
    said = ranks[-1].stdout  # Megatron's last rank says it, for the ranks of all workers
    times = said.rpartition("outer-sync")[2]
    if option == "all":
        assert re.match(r":(\n +rank +\d+: [\d.]+){4}", times), said
    else:
        assert re.match(r" *\.*: *\(?[\d.]+", times), said
