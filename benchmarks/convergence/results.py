# SPDX-License-Identifier: Apache-2.0
"""From finished runs to tables, cases and results.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Case, print_table
from benchmarks.convergence.runs import Measured
from benchmarks.convergence.settings import Method, Run, Study

__all__ = ["Results", "compare", "noise_cases", "write"]

Results = Mapping[Run, Measured]
"""What was measured, by run."""

RECOVERED = 1.02
"""Validation loss against that of the run without noise at which a method has recovered."""


def compare(study: Study, results: Results, seeds: Sequence[int]) -> list[Case]:
    """Print the validation losses at the end; return one case per method that has a reference, over paired seeds."""
    cases, rows = [], []
    for method in study.methods:
        reference = study.reference(method)
        losses = [results[Run(method=method, seed=seed)].final for seed in seeds if _has(results, method, seed)]
        if not losses:
            continue
        both = [seed for seed in seeds if _has(results, method, seed) and _has(results, reference, seed)]
        ratios = [
            results[Run(method=method, seed=seed)].final / results[Run(method=reference, seed=seed)].final
            for seed in both
        ]
        row = [method.title, str(len(losses)), f"{statistics.median(losses):.4f}", _range(losses, ".4f")]
        if method is reference or not ratios:
            rows.append([*row, "-", "-", "-", "-"])
            continue
        case = Case(
            case=f"{method.name}_loss_ratio",
            value=statistics.median(ratios),
            unit="ratio",
            goal=method.goal,
            direction="lower",
        )
        cases.append(case)
        percent = [100 * (ratio - 1) for ratio in ratios]
        goal = "-" if method.goal is None else f"{100 * (method.goal - 1):+.0f} %"
        rows.append([*row, f"{statistics.median(percent):+.2f} %", _range(percent, "+.2f"), goal, case.met])
    head = ("method", "seeds", "validation loss", "range", "against reference", "range", "goal", "met")
    print_table(head, rows)
    return cases


def noise_cases(study: Study, results: Results, seeds: Sequence[int]) -> list[Case]:
    """Print how the methods took the noise; return two cases for each."""
    noise = study.noise
    cases, rows = [], []
    for method in noise.methods:
        spikes, after = [], []
        for seed in seeds:
            clean, noisy = (results.get(Run(method=method, seed=seed, noisy=noisy)) for noisy in (False, True))
            if clean is None or noisy is None:
                continue
            spikes.append(spike(study, noisy, clean))
            after.append(noisy.validation[noise.recovered] / clean.validation[noise.recovered])
            rows.append(
                (
                    method.title,
                    str(seed),
                    f"{spikes[-1]:.3f}",
                    f"{after[-1]:.4f}",
                    f"{noisy.final / clean.final:.4f}",
                    *(str(count) for count in exclusions(study, noisy)),
                )
            )
        if spikes:
            withstands = "local_sgd_skip_anomaly" in method.options
            for name, values, goal in (("meanwhile", spikes, None), ("after_an_interval", after, RECOVERED)):
                cases.append(
                    Case(
                        case=f"noise_{method.name}_{name}",
                        value=statistics.median(values),
                        unit="ratio",
                        goal=goal if withstands else None,
                        direction="lower",
                    )
                )
    if rows:
        print(
            f"\nworker {noise.worker} was fed random tokens in iterations {noise.first + 1} to {noise.end}\n"
            f"validation losses meanwhile, after an interval (iteration {noise.recovered}) and at the end, divided by "
            "those of the run without noise\n"
            "exclusions: of the noisy worker meanwhile, of it in the other rounds, of the others, each counted over "
            "rounds and units\n"
        )
        print_table(
            ("method", "seed", "meanwhile", "after an interval", "at the end", "excluded", "else", "others"), rows
        )
    return cases


def spike(study: Study, noisy: Measured, clean: Measured) -> float:
    """Return the largest validation loss while there was noise, divided by that of the run without."""
    noise = study.noise
    return max(loss / clean.validation[at] for at, loss in noisy.validation.items() if noise.first < at <= noise.end)


def exclusions(study: Study, noisy: Measured) -> tuple[int, int, int]:
    """Count exclusions over rounds and units: of the noisy worker with noise, without it, and of the other workers."""
    noise = study.noise
    meanwhile, otherwise, others = 0, 0, 0
    for entry in noisy.rounds:
        with_noise = noise.first < entry["iteration"] <= noise.end
        for workers in entry["rejected"].values():
            meanwhile += with_noise and noise.worker in workers
            otherwise += not with_noise and noise.worker in workers
            others += len(set(workers) - {noise.worker})
    return meanwhile, otherwise, others


def write(study: Study, results: Results, file: Path) -> None:
    """Write what was measured, without the losses of single steps, as JSON."""
    content = {
        "iterations": study.iterations,
        "noise": {**asdict(study.noise), "methods": [method.name for method in study.noise.methods]},
        "runs": {
            run.name: {
                "method": run.method.name,
                "seed": run.seed,
                "noisy": run.noisy,
                "parameters": measured.parameters,
                "seconds": round(measured.seconds, 1),
                "validation": measured.validation,
            }
            for run, measured in results.items()
        },
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _has(results: Results, method: Method, seed: int) -> bool:
    return Run(method=method, seed=seed) in results


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} - {max(values):{form}}"
