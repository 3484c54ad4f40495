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

    def measures(self) -> dict[tuple[str, str], float]:
        """Return one number for each thing that was measured, by its name and by what it is of."""
        found = {}
        if self.perplexity:
            found["perplexity", _of_tokens(self.perplexity)] = float(self.perplexity["perplexity"])
        for task, values in self.tasks.items():
            name = next((name for name in _PREFERRED if name in values), None)
            if name is not None:
                found[f"{task} ({name})", _of_questions(values)] = values[name]
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


def _of_tokens(perplexity: Mapping[str, Any]) -> str:
    known = {name: perplexity[name] for name in ("part", "split", "sequence_length", "tokens") if name in perplexity}
    of = [Path(str(perplexity["data"])).name] if "data" in perplexity else []
    return ", ".join((*of, *(f"{name.replace('_', ' ')} {value}" for name, value in known.items())))


def _of_questions(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:g}" for name in ("shots", "questions") if name in values)


def _rows(models: Sequence[Results]) -> dict[str, list[float | None]]:
    """Return each model's number for each measure.

    What is of other data or of other questions has a row of its own. A result that does not tell of what it is, such as
    one that was copied from a paper, stands beside those that are all of the same.
    """
    found = [model.measures() for model in models]
    ofs: dict[str, dict[str, None]] = {}
    for name, of in (key for measures in found for key in measures):
        ofs.setdefault(name, {})[of] = None
    rows: dict[str, list[float | None]] = {}
    for name, known in ofs.items():
        if len(known.keys() - {""}) < 2:
            rows[name] = [next((measures[key] for key in measures if key[0] == name), None) for measures in found]
        else:
            for of in known:
                rows[f"{name}: {of or 'not told of what'}"] = [measures.get((name, of)) for measures in found]
    return rows


def table(models: Sequence[Results]) -> Iterator[str]:
    """Yield the lines of a table: a row for each measure, a column for each model."""
    rows = _rows(models)
    width = max([*map(len, rows), 7])
    columns = [max(len(model.name), 9) for model in models]
    head = (f"{model.name:>{column}}" for model, column in zip(models, columns, strict=True))
    yield "  ".join((f"{'measure':<{width}}", *head))
    for name, values in rows.items():
        cells = (
            f"{'-':>{column}}" if value is None else f"{value:>{column}.4f}"
            for value, column in zip(values, columns, strict=True)
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
    rows = _rows(models)
    apart = [[name for name in rows if "perplexity" in name], [name for name in rows if "perplexity" not in name]]
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
        for place, model in enumerate(models):
            at = [number + (place - (len(models) - 1) / 2) * 0.8 / len(models) for number in range(len(shown))]
            bars = axis.bar(at, [rows[name][place] or 0.0 for name in shown], width=0.8 / len(models), label=model.name)
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
