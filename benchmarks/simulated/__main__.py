# SPDX-License-Identifier: Apache-2.0
"""What `megatron-ext simulate` says against what happens: workers in network namespaces of this machine, whose links
carry 100 Mbit/s or 1 Gbit/s, train with several settings, and each is simulated with the figures of that very run.

    python -m benchmarks.simulated [--png FILE] [--json FILE]

Needs root and iproute2. Steps are pauses, so that workers need the processor for messages and rounds alone. The
simulator is given what the run itself shows of its parts: bytes per second of a bare exchange among the workers, in the
pieces of a round or around a ring, or of a stream for peers, a message's time, the mean and the spread of steps, a
worker's own work in a round, the server's seconds for a round. What is compared is what it makes of them: the part of
the time in which workers train.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import (
    MOST_PROCESSES,
    EachOnce,
    add_report_option,
    at_least,
    benchmark_parser,
    number_above,
    picture,
    require_memory,
)
from benchmarks.common import Case, print_table, report
from benchmarks.emulated_network import NetworkUnavailable
from benchmarks.simulated.measurement import measure_all
from benchmarks.simulated.settings import LEAST_VALUES, SETTINGS, VALUES, chosen_settings, values_at
from megatron_ext.cli.ending import ended_by_sigterm

GOAL = 0.15
"""Part of the measured utilisation by which the simulated one may differ, whatever the sign: median of the repeats."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate and report."""
    options = parser().parse_args(arguments)
    chosen = chosen_settings(options.settings)
    if options.latency_ms and any(setting.kind != "service" for setting in chosen):
        parser().error("--latency-ms is of a peer's way to the service; give --settings of the service alone")
    for mbits in options.mbits:
        if options.shrink > values_at(mbits) // LEAST_VALUES:
            most = values_at(mbits) // LEAST_VALUES
            parser().error(f"--shrink {options.shrink} leaves too small a model at {mbits} Mbit/s; give {most} or less")
        # A worker's weights, gradients, anchor, momentum, and messages in flight.
        require_memory(parser(), "--mbits, --workers", 6 * 4 * values_at(mbits) // options.shrink * options.workers)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, options.nice)  # of what is started here, too
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="simulated.") as name:
            found, links = measure_all(options, Path(name))
    except (NetworkUnavailable, PermissionError) as error:
        print(f"benchmarks.simulated: error: {error}", file=sys.stderr)
        return 2
    rows, cases = [], []
    far_key = f"_{options.latency_ms:g}ms" if options.latency_ms else ""
    for (mbits, setting), runs in found.items():
        measured, simulated_ = (
            statistics.median(getattr(run, kind) for run in runs) for kind in ("measured", "simulated")
        )
        errors = [run.simulated / run.measured - 1 for run in runs]
        apart = statistics.median(abs(error) for error in errors)
        spread = f"{min(run.measured for run in runs):.3f} - {max(run.measured for run in runs):.3f}"
        signed = f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f}"
        rows.append([setting, f"{mbits}", f"{measured:.3f}", spread, f"{simulated_:.3f}", f"{100 * apart:.1f}", signed])
        key = f"{setting}_{mbits}mbit{far_key}".replace(",", "").replace(" ", "_").lower()
        cases.append(Case(case=key, value=apart, unit="of the measured", goal=GOAL, direction="lower"))
    for mbits, seen in links.items():
        stream, exchange = (
            [8 * getattr(link, kind) / 1e6 for link in seen] for kind in ("bytes_per_second", "exchange")
        )
        print(
            f"links of {mbits} Mbit/s carry {min(stream):.0f} to {max(stream):.0f} as one stream, and "
            f"{min(exchange):.0f} to {max(exchange):.0f} from each worker when all send"
        )
    far = f"; {options.latency_ms:g} ms to the service, each way" if options.latency_ms else ""
    print(f"{options.workers} workers, {options.repeats} repeats; a step is a pause of {options.step_ms:g} ms{far}\n")
    print_table(["setting", "Mbit/s", "measured", "of repeats", "simulated", "apart, %", "of repeats"], rows)
    if options.png is not None:
        draw(rows, options.png)
    report(cases, options.json)
    return 0


def draw(rows: Sequence[Sequence[str]], file: Path) -> None:
    """Draw measured and simulated utilisation side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(rows) + 1.5), layout="constrained")
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], [float(row[2]) for row in rows], 0.4, label="measured")
    axes.barh([place + 0.2 for place in places], [float(row[4]) for row in rows], 0.4, label="simulated")
    axes.set_yticks(list(places), [f"{row[0]}, {row[1]} Mbit/s" for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="part of the time in which workers train", xlim=(0, 1))
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = benchmark_parser("simulated", __doc__)
    result.add_argument(
        "--workers", type=at_least(2, MOST_PROCESSES), default=3, help="and peers, each on a host of its own (3)"
    )
    result.add_argument(
        "--mbits",
        type=at_least(1, 100_000),
        nargs="+",
        action=EachOnce,
        default=list(VALUES),
        help="of every link (100 1000)",
    )
    result.add_argument("--repeats", type=at_least(1), default=2, help="of everything (2)")
    result.add_argument("--step-ms", type=number_above(0, 1e6), default=50.0, help="of a step (50)")
    names = [setting.name for setting in SETTINGS]
    result.add_argument(
        "--latency-ms",
        type=number_above(0, 10_000, or_equal=True),
        default=0.0,
        help="of a peer's way to the service, in each direction, by a relay at the peer (0)",
    )
    result.add_argument("--settings", nargs="+", action=EachOnce, choices=names, help="which (all)")
    result.add_argument(
        "--nice", type=at_least(-20, 19), default=-15, help="of all processes, on a machine that others use (-15)"
    )
    result.add_argument("--shrink", type=at_least(1), default=1, help="divide the model's size by this (1)")
    result.add_argument("--png", type=picture, metavar="FILE", help="draw the table")
    add_report_option(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
