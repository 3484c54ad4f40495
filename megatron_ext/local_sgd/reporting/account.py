# SPDX-License-Identifier: Apache-2.0
"""What a run says of its rounds: in its log, in TensorBoard and wandb, and in the file of rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_ext.local_sgd.reporting import log_line
from megatron_ext.local_sgd.reporting.inside_bytes import InsideBytes
from megatron_ext.local_sgd.reporting.round_report import RoundReport
from megatron_ext.local_sgd.reporting.round_writer import RoundWriter, round_log_path
from megatron_ext.seams.arguments import say

__all__ = ["RoundAccount"]


class RoundAccount:
    """Takes the reports of rounds, and has what the next lines of each log say."""

    def __init__(self) -> None:
        """Take reports, for the log alone."""
        self._inside = InsideBytes(())
        self._last: RoundReport | None = None
        self._unwritten: list[RoundReport] = []
        self._file: RoundWriter | None = None

    def begin(self, args: Any, model: Sequence[Any]) -> None:
        """Open the file of rounds at rank 0.

        Args:
            args: Megatron's argument namespace.
            model: the model chunks, whose messages inside the worker are counted.

        Raises:
            UserError: the file cannot be written.
        """
        self._inside = InsideBytes(model)
        path = round_log_path(args) if dist.get_rank() == 0 else None
        if path is not None:
            self._file = RoundWriter(path, "--save" if args.local_sgd_round_log is None else "--local-sgd-round-log")

    def count(self, steps: int) -> None:
        """Count inner steps that were made."""
        self._inside.count(steps)

    def take(self, reports: Iterable[RoundReport], iteration: int, *, is_debug: bool) -> None:
        """Take what rounds after an iteration reported, and log what is remarkable at once.

        Args:
            reports: of the rounds.
            iteration: after which they were made.
            is_debug: whether all is remarkable.
        """
        for report in reports:
            self._last = report
            self._unwritten.append(report)
            for remark in report.remarks(is_debug):
                say(f"local SGD: {remark}")
            if self._file is not None:
                self._file.write(report, iteration)

    def fields(self, rounds: int, workers: int) -> list[tuple[str, str]]:
        """Return what Megatron's iteration line gets; see `log_line.fields`."""
        return log_line.fields(rounds, self._last, workers)

    def scalars(self) -> dict[str, float]:
        """Return what TensorBoard and wandb get of the rounds since they were last written to; nothing without any."""
        if not self._unwritten:
            return {}
        reports, self._unwritten = self._unwritten, []
        return log_line.scalars(reports) | self._inside.scalars()
