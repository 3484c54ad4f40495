# SPDX-License-Identifier: Apache-2.0
"""The study's pictures: validation losses of all methods, and what noise did to them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import Measured
from benchmarks.convergence.settings import Run, Study
from benchmarks.pictures import two_axes

__all__ = ["draw_convergence", "draw_noise"]


def draw_convergence(study: Study, results: Results, seeds: Sequence[int], file: Path) -> None:
    """Draw every method's validation loss over the iterations, and the quotients at the end, into a PNG."""
    with two_axes(file) as (curves, ends):
        made = {run.method for run in results if not run.noisy}
        methods = [method for method in study.methods if method in made]
        for place, method in enumerate(methods):
            runs = [results[run] for run in (Run(method=method, seed=seed) for seed in seeds) if run in results]
            at = sorted(runs[0].validation)
            losses = [[run.validation[iteration] for run in runs] for iteration in at]
            curves.plot(at, [statistics.median(each) for each in losses], label=method.title, linewidth=1.2)
            curves.fill_between(at, [min(each) for each in losses], [max(each) for each in losses], alpha=0.2)
            reference = study.reference(method)
            pairs = [(Run(method=method, seed=seed), Run(method=reference, seed=seed)) for seed in seeds]
            ratios = [
                results[run].final / results[other].final for run, other in pairs if {run, other} <= results.keys()
            ]
            ends.plot([100 * (ratio - 1) for ratio in ratios], [place] * len(ratios), "o", color=f"C{place}", alpha=0.7)
            if method.goal is not None:
                ends.plot([100 * (method.goal - 1)] * 2, [place - 0.4, place + 0.4], color="black")
        curves.set(xlabel="iteration", ylabel="validation loss (nats per byte)")
        curves.set_title("Median over seeds, and their range")
        curves.legend()
        line = " (line: goal)" if any(method.goal is not None for method in methods) else ""
        ends.set(xlabel=f"% above the reference{line}", title="Validation loss at the end, every seed")
        ends.set_yticks(range(len(methods)), [method.title for method in methods])
        ends.invert_yaxis()


def draw_noise(study: Study, results: Results, seed: int, file: Path) -> None:
    """Draw by how much noise raised the validation losses, and the training losses of the undisturbed workers."""
    noise = study.noise
    with two_axes(file) as (losses, rises):
        for place, method in enumerate(noise.methods):
            clean, noisy = (results[Run(method=method, seed=seed, noisy=noisy)] for noisy in (False, True))
            at = sorted(noisy.validation)
            above = [100 * (noisy.validation[iteration] / clean.validation[iteration] - 1) for iteration in at]
            losses.plot(at, above, color=f"C{place + 1}", marker=".", label=method.title)
            rise = [
                statistics.mean(with_noise) - statistics.mean(without)
                for with_noise, without in zip(_undisturbed(study, noisy), _undisturbed(study, clean), strict=True)
            ]
            rises.plot(range(1, len(rise) + 1), rise, color=f"C{place + 1}", label=method.title, linewidth=1)
        window = (noise.first - 4 * noise.interval, noise.recovered + 4 * noise.interval)
        losses.set(xlim=window, xlabel="iteration", ylabel="validation loss, % above that without noise")
        losses.set_title("Weights of the last round")
        rises.set(xlim=window, xlabel="iteration", ylabel="training loss above that without noise")
        rises.set_title("The other workers, step by step")
        for axes in (losses, rises):
            what = f"random tokens for worker {noise.worker}"
            axes.axvspan(noise.first, noise.end, color="grey", alpha=0.2, label=what)
            axes.legend(loc="upper left", fontsize="small", framealpha=0.5)
            axes.margins(y=0.4)


def _undisturbed(study: Study, run: Measured) -> list[tuple[float, ...]]:
    """Return per iteration the losses of all workers but the noisy one."""
    others = [losses for worker, losses in enumerate(run.training) if worker != study.noise.worker]
    return list(zip(*others, strict=True))
