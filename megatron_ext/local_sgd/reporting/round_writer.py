# SPDX-License-Identifier: Apache-2.0
"""Writing the file of rounds during a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.reporting.round_log import FILE_NAME, append_round
from megatron_ext.local_sgd.reporting.round_report import RoundReport
from megatron_ext.output_files import output_problems
from megatron_ext.seams.arguments import say

__all__ = ["RoundWriter", "round_log_path"]


_OF_THE_FILE = "--local-sgd-round-log"


class RoundWriter:
    """The file while a run writes it. A full disk costs the file, not the run."""

    def __init__(self, path: Path, asked_by: str = _OF_THE_FILE) -> None:
        """Open it, or make it.

        Args:
            path: the file.
            asked_by: the option that says so; where it is not that of this file, but of a folder, the folder is made.

        Raises:
            UserError: it cannot be written, which is better said at the start than hours later.
        """
        self._path: Path | None = path
        if asked_by == _OF_THE_FILE and (problems := output_problems(asked_by, path)):
            raise UserError(problems[0])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise UserError(
                f"{asked_by}: rounds cannot be written to {path} ({error.strerror}); give a place that can be "
                "written, or --local-sgd-round-log none"
            ) from None

    def write(self, report: RoundReport, iteration: int) -> None:
        """Append the round that followed an iteration, counted from 0."""
        if self._path is None:
            return
        try:
            append_round(self._path, {"iteration": iteration + 1, "time": time.time(), **report.as_dict()})
        except OSError as error:
            say(f"local SGD: rounds are no longer written to {self._path}: {error}")
            self._path = None


def round_log_path(args: Any) -> Path | None:
    """Return where a run's rounds are written, None for nowhere."""
    wanted = args.local_sgd_round_log
    if wanted is None:
        # --save may name a place that is not a folder of this machine, such as msc://bucket.
        return Path(args.save) / FILE_NAME if args.save and "://" not in args.save else None
    return None if wanted == "none" else Path(wanted)
