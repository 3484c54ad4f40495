# SPDX-License-Identifier: Apache-2.0
"""Train one GPT with hot switching and with single strategies; examples/hot_switch/quickstart.sh starts it."""

import argparse
import ast
import json
import os
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))  # the other quickstart's stages

from entry import claim, exit_status  # noqa: E402  # found through the path above
from settings import IMPLEMENTATION  # noqa: E402  # likewise
from stages import StageError, run_stage  # noqa: E402  # likewise

MARKER = ".megatron-ext-hot-switch-quickstart"
"""In the output folder: says that it is ours, so that old results in it may be removed."""

PURPOSE = """\
What this shows: hot switching changes no result, and what it moves. What it does not show: speed. Times of processes
that share a CPU say nothing about GPUs. Where it pays: megatron-ext simulate hot-switch (docs/simulate.md)
"""

PROCESSES = 4
CONTEXT = 1024
LEAST_ITERATIONS = 4
HOT = ("1,2,2", "4,1,1", "2,2,1")
BUCKETS = (CONTEXT, 512, 256, 0)
"""Home trains lengths above 512, the first guest those up to 256, the second one those between."""

MODEL = {
    "num-layers": 4,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": CONTEXT,
    "max-position-embeddings": CONTEXT,
    "position-embedding-type": "rope",
    "hidden-dropout": 0,
    "attention-dropout": 0,
}
TRAINING = {
    "micro-batch-size": 1,
    "global-batch-size": 16,
    "lr": 1e-3,
    "lr-decay-style": "constant",
    "clip-grad": 1.0,
    "seed": 1234,
    "eval-iters": 0,
    "log-interval": 1,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 257,
    "make-vocab-size-divisible-by": 8,
    "split": "100,0,0",
    "num-workers": 0,
    "distributed-backend": "gloo",
}

_LINE = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*lm loss: ([\d.E+-]+)")
_FIELDS = {"tokens": r"tokens: (\d+)", "padding": r"padding: ([\d.]+)%", "switching": r"switching \(ms\): ([\d.]+)"}
_GUEST = re.compile(r"guest (\S+) takes ([\d.]+) MiB of parameters from .+ and sends ([\d.]+) MiB of gradients")


@dataclass(kw_only=True)
class Run:
    """One training run, as its log tells."""

    strategies: tuple[str, ...]
    """Home first."""

    buckets: tuple[int, ...]
    """Bounds of lengths."""

    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    switching: list[float] = field(default_factory=list)
    guests: list[tuple[str, float, float]] = field(default_factory=list)
    """(strategy, MiB of parameters, MiB of gradients) that a step moves."""

    @property
    def name(self) -> str:
        """Of its log."""
        return "hot" if len(self.strategies) > 1 else "static_" + self.strategies[0].replace(",", "_")

    @property
    def title(self) -> str:
        """For people."""
        return f"hot {' '.join(self.strategies)}" if len(self.strategies) > 1 else f"static {self.strategies[0]}"

    def read_line(self, line: str) -> None:
        """Take what a line of Megatron's log says."""
        guest = _GUEST.search(line)
        if guest:
            self.guests.append((guest[1], float(guest[2]), float(guest[3])))
        found = _LINE.search(line)
        if not found:
            return
        self.milliseconds.append(float(found[2]))
        self.losses.append(float(found[3]))
        for name, pattern in _FIELDS.items():
            match = re.search(pattern, line)
            if match:
                getattr(self, name).append(float(match[1]))

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says; times without those of the first two iterations.

        The first one makes plans and groups, and Megatron's second line tells the mean of both.
        """
        seconds = [milliseconds / 1000 for milliseconds in self.milliseconds]
        return {
            "strategies": list(self.strategies),
            "bucket_sizes": list(self.buckets),
            "final_loss": self.losses[-1],
            "losses": self.losses,
            "tokens_per_second": sum(self.tokens[2:]) / sum(seconds[2:]),
            "ms_per_iteration": statistics.median(self.milliseconds[2:]),
            "switching_ms_per_iteration": statistics.median(self.switching[2:]) if self.switching else 0.0,
            "padding_percent": statistics.mean(self.padding),
            "guests": [
                {"strategy": name, "parameters_mib": parameters, "gradients_mib": gradients}
                for name, parameters, gradients in self.guests
            ],
        }


def main() -> int:
    """Run the quickstart; return 1 when a run failed, 2 for bad options, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "hot_switch_quickstart")
    options = parser.parse_args()
    return exit_status(lambda: compare(options.output.resolve(), options.iterations))


def compare(output: Path, iterations: int) -> int:
    """Make the corpus and all runs, and write the results.

    Raises:
        ValueError: an option cannot be used.
    """
    if iterations < LEAST_ITERATIONS:
        raise ValueError(f"--iterations is {iterations}; it must be at least {LEAST_ITERATIONS}")
    claim(output, MARKER)
    for file in (*output.glob("*.log"), output / "summary.json", output / "comparison.png"):
        file.unlink(missing_ok=True)
    print(PURPOSE, flush=True)
    corpus = prepare(output)
    runs = [Run(strategies=HOT, buckets=BUCKETS)]
    runs += [Run(strategies=(strategy,), buckets=(CONTEXT, 0)) for strategy in HOT]
    for run in runs:
        print(f"{run.title}: {iterations} iterations on {PROCESSES} processes", flush=True)
        run_stage(command(run, corpus, iterations), output / f"{run.name}.log", environment(), run.read_line)
        if len(run.losses) != iterations:
            raise StageError(f"{len(run.losses)} of {iterations} iterations are in {output / f'{run.name}.log'}")
    content = {run.name: run.summary() for run in runs}
    (output / "summary.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    plot(runs, output / "comparison.png")
    print(report(runs))
    print(f"\nlogs, summary.json and comparison.png are in {output}")
    return 0


def prepare(output: Path) -> Path:
    """Make a corpus of functions and classes, one document each; return its prefix."""
    lines, prefix = output / "functions.jsonl", output / "corpus" / "functions"
    with lines.open("w", encoding="utf-8") as file:
        for text in definitions():
            file.write(json.dumps({"text": text}) + "\n")
    arguments = ["data", "prepare", str(lines), "--output-prefix", str(prefix), "--shuffle-documents", "1"]
    run_stage(
        [sys.executable, "-m", "megatron_ext.cli.main", *arguments, "--overwrite"], output / "corpus.log", environment()
    )
    return prefix


def definitions() -> Iterator[str]:
    """Yield the source of every function and class of the standard library's own modules, methods one by one."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.parse(source).body:
            members = [node, *(node.body if isinstance(node, ast.ClassDef) else [])]
            for member in members[1:] if len(members) > 1 else members:
                if isinstance(member, ast.FunctionDef | ast.ClassDef):
                    yield ast.get_source_segment(source, member) or ""


def environment() -> dict[str, str]:
    """Return the environment of a run: as many threads as there are cores for a process."""
    threads = max(1, len(os.sched_getaffinity(0)) // PROCESSES)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}


def command(run: Run, corpus: Path, iterations: int) -> list[str]:
    """Return the command line of a run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    options = {**MODEL, **TRAINING, "train-iters": iterations, "eval-interval": iterations + 1, "data-path": corpus}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    strategies = ["--hot-switch-strategies", *run.strategies]
    strategies += ["--hot-switch-bucket-sizes", *map(str, run.buckets)]
    return [*launcher, str(ROOT / "examples" / "pretrain_gpt.py"), *flags, *IMPLEMENTATION, *strategies]


def report(runs: list[Run]) -> str:
    """Return the results as text."""
    lines = [f"\n{'':<24}{'tokens/s':>10}{'ms/step':>10}{'switching':>11}{'padding':>9}{'loss':>9}"]
    for run in runs:
        found = run.summary()
        lines.append(
            f"{run.title:<24}{found['tokens_per_second']:>10.0f}{found['ms_per_iteration']:>10.0f}"
            f"{found['switching_ms_per_iteration']:>8.1f} ms{found['padding_percent']:>8.1f}%"
            f"{found['final_loss']:>9.4f}"
        )
    lines.append("\nWhat a step of the hot run moves, all processes together:")
    for name, parameters, gradients in runs[0].guests:
        lines.append(f"  guest {name}: {parameters:.1f} MiB of parameters, {gradients:.1f} MiB of gradients")
    hot, home = runs[0], next(run for run in runs[1:] if run.strategies[0] == runs[0].strategies[0])
    spread = max(abs(loss - other) for loss, other in zip(hot.losses, home.losses, strict=True))
    lines.append(f"\nLargest difference between the hot run's losses and those of {home.title}, its home: {spread:.1e}")
    lines.append("(Megatron draws a model's first weights by its layout, so the other runs begin elsewhere.)")
    return "\n".join(lines)


def draw_losses(axes: Any, runs: list[Run]) -> None:
    """Draw the losses of every run, the hot one's as rings: they are those of its home, whose line they lie on."""
    hot, *static = runs
    for run in static:
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=run.title, alpha=0.7)
    axes.plot(range(1, len(hot.losses) + 1), hot.losses, "o", color="black", fillstyle="none", label=hot.title)
    axes.legend()


def plot(runs: list[Run], file: Path) -> None:
    """Draw losses and speeds into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, speeds) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    draw_losses(losses, runs)
    losses.set(xlabel="iteration", ylabel="loss (nats per byte of text)", title="Training loss, on the same documents")
    speeds.barh([run.title for run in runs], [run.summary()["tokens_per_second"] for run in runs])
    speeds.invert_yaxis()
    speeds.set(xlabel="tokens per second", title="Speed of 4 processes on the cores of this machine")
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
