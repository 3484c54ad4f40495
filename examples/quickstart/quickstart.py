# SPDX-License-Identifier: Apache-2.0
"""Train one GPT on real text, synchronously and with DiLoCo; examples/quickstart.sh starts it."""

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entry import claim, exit_status
from report import Run, describe_patches, plot, resumed_differences, table
from settings import DEFAULT_ITERATIONS, WORKERS, Quickstart, Schedule, choose_machine
from stages import progress, run_stage

ROOT = Path(__file__).resolve().parents[2]
MARKER = ".megatron-ext-quickstart"
"""In the output folder: says that it is ours, so that old results in it may be removed."""


def main() -> int:
    """Run the quickstart; return 1 when a stage or a promise failed, 2 for bad options, 130 on Ctrl-C."""
    options = parse_options()
    return exit_status(lambda: run(settings_from(options)))


def parse_options() -> argparse.Namespace:
    """Parse the command line; `examples/quickstart.sh --help` explains it."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--iterations", type=int, default=DEFAULT_ITERATIONS)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "quickstart")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args()


def settings_from(options: argparse.Namespace) -> Quickstart:
    """Check the options and look at the machine.

    Raises:
        ValueError: an option cannot be used.
    """
    schedule = Schedule(iterations=options.iterations)
    gpus = 0
    if options.backend != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    machine = choose_machine(options.backend, gpus)
    output = options.output.resolve()
    claim(output, MARKER)
    if gpus and machine.backend == "cpu":
        print(f"one GPU is not enough for {WORKERS} workers, so the CPU is used\n")
    return Quickstart(output=output, schedule=schedule, machine=machine)


def run(quickstart: Quickstart) -> int:
    """Run all stages and write the results."""
    start = time.monotonic()
    schedule, log = quickstart.schedule, quickstart.log
    remove_old_results(quickstart)
    print(introduction(quickstart))
    seconds: dict[str, float] = {}

    title = "Corpus: the source code of Python's standard library, one token per byte"
    with stage(1, title, log("corpus"), seconds):
        run_stage(quickstart.prepare_data(), log("corpus"))
        show_corpus(quickstart)

    title = "Synchronous training: stock Megatron"
    with stage(2, title, log("synchronous"), seconds):
        synchronous = train(quickstart, "synchronous", quickstart.synchronous())

    title = f"Local SGD (DiLoCo): {schedule.warmup} steps of warm-up, then a round every {schedule.interval}"
    with stage(3, title, log("local_sgd"), seconds):
        local_sgd = train(quickstart, "local_sgd", quickstart.local_sgd())

    title = f"Resuming from the checkpoint of iteration {schedule.checkpoint}, in the middle of an interval"
    with stage(4, title, log("resumed"), seconds):
        resumed = train(quickstart, "resumed", quickstart.resumed())

    differences = resumed_differences(local_sgd, resumed)
    seconds["total"] = time.monotonic() - start
    summary = summarize(quickstart, synchronous, local_sgd, not differences, seconds)
    (quickstart.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot(synchronous, local_sgd, quickstart.output / "losses.png")
    print(f"\nResults after {seconds['total']:.0f} s\n\n{table(summary, schedule.interval)}\n")
    print(f"{describe_patches(summary)}\n\n{WHERE_TO_LOOK.format(output=quickstart.output)}")
    return refuse(differences, summary)


def remove_old_results(quickstart: Quickstart) -> None:
    """Remove what an earlier quickstart wrote, except the corpus."""
    output = quickstart.output
    for folder in (output / "records", quickstart.checkpoints, quickstart.index_cache):
        if folder.exists():
            shutil.rmtree(folder)
    for file in (*output.glob("*.log"), output / "summary.json", output / "losses.png"):
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def stage(number: int, title: str, log: Path, seconds: dict[str, float]) -> Iterator[None]:
    """Announce a stage and note how long it takes."""
    print(f"\n[{number}/4] {title}\n      (log: {log})", flush=True)
    start = time.monotonic()
    yield
    seconds[log.stem] = time.monotonic() - start


def train(quickstart: Quickstart, name: str, command: list[str]) -> Run:
    """Run a training command, show its progress, and return what its ranks recorded."""

    def show(line: str) -> None:
        shown = progress(line)
        if shown is not None:
            print(f"      {shown}", flush=True)

    machine = quickstart.machine
    run_stage(command, quickstart.log(name), machine.environment(), show)
    return Run.read(quickstart.records(name), machine.processes)


def show_corpus(quickstart: Quickstart) -> None:
    """Say what the corpus holds."""
    facts = json.loads(quickstart.corpus.with_suffix(".json").read_text(encoding="utf-8"))
    print(f"      {facts['documents']:,} documents, {facts['tokens']:,} tokens")


def summarize(
    quickstart: Quickstart, synchronous: Run, local_sgd: Run, bit_exact: bool, seconds: dict[str, float]
) -> dict[str, Any]:
    """Return the contents of summary.json."""
    schedule, machine = quickstart.schedule, quickstart.machine
    runs = {
        "synchronous": synchronous.summary(schedule.interval, schedule.warmup),
        "local_sgd": local_sgd.summary(schedule.interval, schedule.warmup),
    }
    sent = {name: run["cross_worker_bytes_per_iteration"] for name, run in runs.items()}
    return {
        **runs,
        "cross_worker_bytes_ratio": sent["local_sgd"] / sent["synchronous"],
        "resume_bit_exact": bit_exact,
        "settings": {
            "iterations": schedule.iterations,
            "workers": WORKERS,
            "tensor_parallel": machine.tensor_parallel,
            "interval": schedule.interval,
            "warmup": schedule.warmup,
            "resumed_from_iteration": schedule.checkpoint,
            "backend": machine.backend,
        },
        "commands": {
            "synchronous": quickstart.synchronous(),
            "local_sgd": quickstart.local_sgd(),
            "resumed": quickstart.resumed(),
        },
        "versions": synchronous.ranks[0]["versions"],
        "seconds": seconds,
    }


def refuse(differences: list[str], summary: dict[str, Any]) -> int:
    """Return 1, with the reason, if something that the quickstart promises did not hold."""
    for difference in differences:
        print(f"quickstart: error: the resumed run differs: {difference}", file=sys.stderr)
    foreign = summary["synchronous"]["patches"]["training"]
    if foreign:
        print(f"quickstart: error: {foreign} training patches in the synchronous run", file=sys.stderr)
    return 1 if differences or foreign else 0


def introduction(quickstart: Quickstart) -> str:
    """Return what a newcomer should know before it starts."""
    machine = quickstart.machine
    on_cpu = "\n               except what it takes to run on a CPU" if machine.backend == "cpu" else ""
    return INTRODUCTION.format(
        where=machine.describe(),
        on_cpu=on_cpu,
        tensor_parallel=machine.tensor_parallel,
        output=quickstart.output,
    )


INTRODUCTION = """\
This trains a small GPT twice, with the same data and the same seed, and compares:

  synchronous  Stock Megatron-LM, tensor parallel {tensor_parallel} x data parallel 2: {where}.
               The two replicas exchange gradients at every step. Nothing in Megatron is changed{on_cpu}.
  local SGD    The same command plus --use-local-sgd and a few more options. The replicas become
               workers: they train apart and meet in an outer round every few steps (DiLoCo).
               patch_megatron() wraps the functions of Megatron that this takes.

Both start examples/pretrain_gpt.py. The second run is then resumed from a checkpoint to show that
this changes no bit. Everything is written to {output}."""

WHERE_TO_LOOK = """\
Where to look next
  {output}/summary.json
      these figures, all settings, and the full commands to start the runs yourself
  {output}/losses.png
      loss curves, and what was sent between the workers
  docs/quickstart.md
      what is counted, and how
  .venv/bin/megatron-ext patches
      every patch, what it wraps, and why"""


if __name__ == "__main__":
    sys.exit(main())
