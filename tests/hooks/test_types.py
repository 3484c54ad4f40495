# SPDX-License-Identifier: Apache-2.0
"""What is wrong about an event or a handler is an error of mypy's, in the seams and in features from anywhere."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from typing import Any

from megatron_ext.hooks import Feature, SavesState, StepEnd, StepStart, TrainingLog, hooks, on


class Mine(Feature):
    name = "mine"

    @on(StepEnd)
    def right(self, step: StepEnd) -> None:
        step.iteration + 1

    @on(StepStart)  # arg-type
    def other(self, step: StepEnd) -> None: ...

    @on("after_step")  # arg-type
    def by_name(self, step: Any) -> None: ...

    @on(TrainingLog)
    def field(self, log: TrainingLog) -> None:
        log.loss  # attr-defined

    def validate(self, args: Any) -> str:  # override
        return ""


class Half(Feature, SavesState):
    name = "half"

    def save_state(self, context: int) -> None: ...  # override


hooks.fire(StepEnd(iteration=1, completed=True))
hooks.fire(StepStart(iteration="1"))  # arg-type
hooks.fire(StepEnd(iteration=1))  # call-arg
hooks.fire("after_step")  # arg-type
hooks.fire(StepEnd)  # arg-type
hooks.register([Half()])  # abstract
"""


def test_mypy_finds_wrong_events_wrong_values_wrong_handlers_and_half_a_protocol(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    checked = [*(ROOT / "megatron_ext" / "hooks").glob("*.py"), ROOT / "megatron_ext" / "errors.py", file]
    options = ["--config-file=", "--strict", "--follow-imports=skip", "--no-incremental", "--hide-error-context"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, checked)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(f"{file}:") and ": error:" in line]
    said = {int(line.split(":")[1]): line.rsplit("[", 1)[1].rstrip("]") for line in found}
    lines = CODE.splitlines()
    assert said == {
        number: line.rsplit("  # ", 1)[1] for number, line in enumerate(lines, 1) if "  # " in line
    }, done.stdout + done.stderr
