# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package lm-evaluation-harness, its own or those of a local folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install_extra

__all__ = ["Task", "check_tasks", "parse_tasks", "run_tasks"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, and how many solved examples go in front of each question."""

    name: str
    """As lm-evaluation-harness knows it."""

    shots: int | None = None
    """Solved examples; None for what the task itself says."""


def parse_tasks(text: str) -> list[Task]:
    """Return the tasks in a list such as ``sciq:0,arc_challenge:25,mmlu``.

    Raises:
        UserError: a number of examples is none, or there is no task.
    """
    tasks = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, shots = word.partition(":")
        if not name or (shots and not shots.isdecimal()):
            raise UserError(f"--tasks {word}: give NAME or NAME:SHOTS, as arc_challenge:25")
        tasks.append(Task(name=name, shots=int(shots) if shots else None))
    if not tasks:
        raise UserError("--tasks: no task is named")
    return tasks


def check_tasks(tasks: Sequence[Task], folder: Path | None = None) -> Any:
    """Check that there are these tasks, before anything that takes long.

    Args:
        tasks: which.
        folder: of task files (YAML) that count beside the harness' own.

    Returns:
        What the harness finds them with.

    Raises:
        UserError: lm-evaluation-harness is not installed, or does not know a task.
    """
    try:
        import lm_eval.models.huggingface  # noqa: F401  # what is asked for later
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"--tasks needs lm-evaluation-harness ({error}); run `{pip_install_extra('eval')}`"
        ) from error
    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [task.name for task in tasks if not manager.match_tasks([task.name])]
    if unknown:
        where = "" if folder is None else f", nor is it in {folder}"
        raise UserError(f"--tasks: lm-evaluation-harness knows no task {', '.join(unknown)}{where}")
    return manager


def run_tasks(
    model: Any,
    tokenizer: Path,
    tasks: Sequence[Task],
    *,
    manager: Any,
    limit: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Return the results of tasks: by each one's name its measures, and how many `shots` and `questions` they are of.

    Args:
        model: as transformers has loaded it.
        tokenizer: folder of its tokenizer.
        tasks: which.
        manager: what `check_tasks` returned for them.
        limit: questions of each task; None for all.
        batch_size: questions at a time.

    Raises:
        UserError: a measure is non-finite.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    loaded = HFLM(pretrained=model, tokenizer=str(tokenizer), batch_size=batch_size)
    found: dict[str, dict[str, float]] = {}
    # One call for each number of examples, which holds for all tasks of a call.
    for shots in dict.fromkeys(task.shots for task in tasks):
        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=loaded,
            tasks=[task.name for task in tasks if task.shots == shots],
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
        )
        for name, values in results["results"].items():
            found[name] = _measures(name, values) | _conditions(name, results)
    return found


def _measures(task: str, values: dict[str, Any]) -> dict[str, float]:
    """A task's measures, without the name of the filter that all have."""
    found = {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in ("alias", "sample_len")
    }
    # Of a single question, or of equal ones, there is no error to be estimated.
    found = {name: value for name, value in found.items() if "_stderr" not in name or math.isfinite(value)}
    for name, value in found.items():
        if not math.isfinite(value):
            raise UserError(f"--tasks {task}: {name} is {value}: the model has, or computes, non-finite values")
    return found


def _conditions(task: str, results: dict[str, Any]) -> dict[str, float]:
    """How many examples and questions a task's measures are of; the harness does not tell it of every group."""
    shots, questions = results["n-shot"].get(task), results["n-samples"].get(task)
    found = {} if shots is None else {"shots": float(shots)}
    return found if questions is None else {**found, "questions": float(questions["effective"])}
