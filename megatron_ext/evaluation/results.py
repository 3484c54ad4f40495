# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: in a JSON file, as a table, and as a picture beside other models'."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install

__all__ = ["PICTURES", "WRITER", "Results", "draw", "read_results", "table"]

WRITER = "megatron-ext evaluate"
"""What pictures say that they were made by."""

PICTURES: Mapping[str, str] = MappingProxyType({".png": "Software", ".svg": "Creator"})
"""By the ending of a picture's name, the field in which it says so."""

_PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "bleu", "word_perplexity", "perplexity")
"""Measures by which a task is compared, the first one that it has."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What is known of a model."""

    name: str
    """What tables and pictures call it."""

    model: str
    """Its folder."""

    perplexity: Mapping[str, Any] = field(default_factory=dict)
    """`tokens`, `loss`, `perplexity`, and of what they are; empty where it was not measured."""

    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By each task's name, its measures."""

    def write(self, path: Path) -> None:
        """Write them as JSON.

        Raises:
            UserError: they cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error

    def measures(self) -> dict[str, float]:
        """Return one number for each thing that was measured, by its name."""
        found = {}
        if self.perplexity:
            found["perplexity"] = float(self.perplexity["perplexity"])
        for task, values in self.tasks.items():
            name = next((name for name in _PREFERRED if name in values), None)
            if name is not None:
                found[f"{task} ({name})"] = values[name]
        return found


def read_results(path: Path) -> Results:
    """Return the results in a file.

    Raises:
        UserError: there is none, or something else is in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        problem = _problem(content)
    except OSError as error:
        raise UserError(f"--baseline {path}: {error.strerror}") from error
    except ValueError as error:
        problem = f"it is not JSON: {error}"
    if problem is not None:
        raise UserError(f"--baseline {path}: not what `megatron-ext evaluate --output` writes: {problem}")
    return Results(**content)


def _problem(content: Any) -> str | None:
    """Why a file's content is not that of results; None where it is."""
    if not isinstance(content, dict):
        return "it has no object"
    names = {entry.name for entry in fields(Results)}
    if missing := sorted(names - content.keys()):
        return f"it has no field {missing[0]!r}"
    if unknown := sorted(content.keys() - names):
        return f"it has a field {unknown[0]!r}"
    found, tasks = content["perplexity"], content["tasks"]
    if not isinstance(found, dict) or (found and not _is_number(found.get("perplexity"))):
        return "its field 'perplexity' has none"
    if not isinstance(tasks, dict) or not all(
        isinstance(values, dict) and all(map(_is_number, values.values())) for values in tasks.values()
    ):
        return "its field 'tasks' has something else than numbers"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def table(models: Sequence[Results]) -> Iterator[str]:
    """Yield the lines of a table: a row for each measure, a column for each model."""
    found = [model.measures() for model in models]
    names = list(dict.fromkeys(name for measures in found for name in measures))
    width = max([*map(len, names), 7])
    columns = [max(len(model.name), 9) for model in models]
    head = (f"{model.name:>{column}}" for model, column in zip(models, columns, strict=True))
    yield "  ".join((f"{'measure':<{width}}", *head))
    for name in names:
        cells = (
            f"{measures[name]:>{column}.4f}" if name in measures else f"{'-':>{column}}"
            for measures, column in zip(found, columns, strict=True)
        )
        yield "  ".join((f"{name:<{width}}", *cells))


def draw(models: Sequence[Results], file: Path) -> None:
    """Draw bars, a group for each measure and a bar for each model; perplexities, which have another scale, apart.

    Args:
        models: at least one.
        file: replaced; its ending, one of `PICTURES`, says the format.

    Raises:
        UserError: it cannot be drawn.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError(f"--picture needs matplotlib; run `{pip_install('matplotlib')}`") from error
    found = [model.measures() for model in models]
    names = list(dict.fromkeys(name for measures in found for name in measures))
    apart = [[name for name in names if "perplexity" in name], [name for name in names if "perplexity" not in name]]
    titles = ("perplexity (lower is better)", "tasks")
    panels = [(names, title) for names, title in zip(apart, titles, strict=True) if names]
    sizes = [len(names) for names, _ in panels]
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4 + 1.2 * sum(sizes), 4.5),
        width_ratios=sizes,
        layout="constrained",
        squeeze=False,
    )
    for axis, (shown, title) in zip(axes[0], panels, strict=True):
        for place, (model, measures) in enumerate(zip(models, found, strict=True)):
            at = [number + (place - (len(models) - 1) / 2) * 0.8 / len(models) for number in range(len(shown))]
            bars = axis.bar(at, [measures.get(name, 0.0) for name in shown], width=0.8 / len(models), label=model.name)
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set(title=title)
        axis.set_xticks(range(len(shown)), shown, rotation=30, ha="right")
    axes[0][-1].legend()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {PICTURES[file.suffix.lower()]: WRITER} if file.suffix.lower() in PICTURES else {}
        figure.savefig(file, metadata=metadata)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {file}: cannot be drawn ({error})") from error
    finally:
        pyplot.close(figure)
