# SPDX-License-Identifier: Apache-2.0
"""Samples per second of four workers in Megatron's loop of which one is slow: synchronous, EDiT, A-EDiT.

    python -m benchmarks.straggler_in_megatron [--json FILE]

Every inner step of a tiny GPT is followed by a pause, as `benchmarks.straggler` has it without Megatron, so that what
is measured is who waits for whom. README.md tells what the figures say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by its path, a script knows only its folder

from benchmarks.command_line import add_report_option, add_slow_by_option, at_least, benchmark_parser, number_above
from benchmarks.common import Case, print_table, report
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain

WORKERS = 4
METHODS = ("synchronous", "edit", "a_edit")
SAMPLES = 2
"""Of one step of one worker."""
GUARD = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 10.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method at every slowness, and report."""
    options = parser().parse_args(arguments)
    rows, cases = [], []
    for slow_by in options.slow_by:
        rates = {method: _rate(method, slow_by, options) for method in METHODS}
        ideal = SAMPLES / options.step_seconds * (WORKERS - 1 + 1 / slow_by)
        rows += [(f"{slow_by} x", method, f"{rate:.2f}", f"{rate / ideal:.2f}") for method, rate in rates.items()]
        cases += [
            Case(
                case=f"in_megatron_a_edit_over_{other}_x{slow_by}",
                value=rates["a_edit"] / rates[other],
                unit="ratio",
                goal=1.8 if (other, slow_by) == ("edit", 4) else None,
                direction="higher",
            )
            for other in ("synchronous", "edit")
        ]
    print(f"{WORKERS} workers, a pause of {options.step_seconds:g} s in every step; one worker is slower\n")
    print_table(("slower by", "method", "samples/s", "of what all could do"), rows)
    print()
    report(cases, options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = benchmark_parser("straggler_in_megatron", __doc__)
    add_slow_by_option(found)
    found.add_argument(
        "--step-seconds", type=number_above(0, 3600), default=0.5, help="pause in a step of the others (0.5)"
    )
    found.add_argument("--interval", type=at_least(1), default=8, help="steps of EDiT's interval (8)")
    found.add_argument("--intervals", type=at_least(1), default=4, help="intervals of each method (4)")
    add_report_option(found)
    return found


def slow_steps(pause: float, slow_by: int) -> None:
    """Make every inner step of this rank take longer, the last rank's most; Megatron is not patched yet."""
    import functools
    import os
    import time

    import megatron.training.training as training

    original = training.train_step
    own = pause * (slow_by if os.environ["RANK"] == str(WORKERS - 1) else 1)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        vars(training).setdefault("first_step_at", time.perf_counter())
        time.sleep(own)
        return original(*args, **kwargs)

    training.train_step = train_step


def samples_and_seconds(_model: Any, _optimizer: Any, args: Any) -> tuple[int, float]:
    """Return what was trained since the first step, and how long that took."""
    import time

    import megatron.training.training as training

    return args.consumed_train_samples, time.perf_counter() - vars(training).pop("first_step_at")


def _rate(method: str, slow_by: int, options: argparse.Namespace) -> float:
    steps = options.interval * options.intervals
    given: dict[str, Any] = {"global_batch_size": WORKERS * SAMPLES, "micro_batch_size": SAMPLES}
    if method != "synchronous":
        given |= {"use_local_sgd": True, "local_sgd_workers": WORKERS, **GUARD}
    if method == "edit":
        given["local_sgd_sync_interval"] = options.interval
    if method == "a_edit":
        # In the fast workers' time of EDiT's interval the slow one makes fewer steps.
        given |= {
            "local_sgd_use_async": True,
            "local_sgd_sync_time": options.interval * options.step_seconds,
            "local_sgd_min_total_global_steps": 1,
        }
        steps = int(steps * (WORKERS - 1 + 1 / slow_by) / WORKERS)
    ranks = run_pretrain(
        toy_gpt(given, train_iters=steps, log_interval=1000),
        WORKERS,
        probe=samples_and_seconds,
        before=partial(slow_steps, options.step_seconds, slow_by),
        timeout=600 + 4 * slow_by * steps * options.step_seconds,
    )
    samples = ranks[0].probe[0]
    return float(samples / max(rank.probe[1] for rank in ranks))


if __name__ == "__main__":
    # By its module's name: the workers look the functions up where they were defined.
    from benchmarks.straggler_in_megatron import main as run

    sys.exit(run())
