# SPDX-License-Identifier: Apache-2.0
"""Configuration of rounds by time inside Megatron's loop: the fields' docstrings are the command line's help texts."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import json
import math
from dataclasses import dataclass

from megatron_ext.config_options import FromArgs
from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig

__all__ = ["MeetingsConfig", "read_meetings"]


@dataclass(frozen=True, kw_only=True)
class MeetingsConfig(FromArgs):
    """What a run whose workers meet by time (--local-sgd-use-async) keeps of its meetings, and where its data end."""

    local_sgd_data_slack: float = 1.5
    """With --local-sgd-use-async: make the training data for workers of which each reads up to this many times its
    share of the samples. A worker that is through begins its slices of the data again, which the log says."""

    local_sgd_record_meetings: str | None = None
    """With --local-sgd-use-async: file to which every meeting appends a line, the list of the steps that each worker
    has made since the last one. Checkpoints hold it as well."""

    local_sgd_replay_meetings: str | None = None
    """With --local-sgd-use-async: meet after the steps in this file, which another run has recorded, instead of by the
    clock. Repeats that run bit for bit; where the file ends, the clock decides again."""

    def problems(self, config: LocalSGDConfig) -> list[str]:
        """Return the problems of the values, one sentence each.

        Args:
            config: of local SGD in this run.
        """
        if not config.use_async:
            return [
                f"{flag} has no effect without --local-sgd-use-async; drop it"
                for flag, default in MeetingsConfig().by_flag().items()
                if self.by_flag()[flag] != default
            ]
        found = []
        if not 1 <= self.local_sgd_data_slack < math.inf:
            found.append(f"--local-sgd-data-slack is {self.local_sgd_data_slack:g}; it must be finite, and 1 or more")
        if self.local_sgd_record_meetings is not None and not self.local_sgd_record_meetings.strip():
            found.append("--local-sgd-record-meetings is empty; give a file, or drop it")
        if self.local_sgd_replay_meetings is not None and config.local_sgd_workers is not None:
            try:
                read_meetings(self.local_sgd_replay_meetings, config.local_sgd_workers)
            except UserError as error:
                found.append(str(error))
        return found


def read_meetings(path: str, workers: int) -> list[list[int]]:
    """Return the steps of every worker at each meeting that a file records.

    Raises:
        UserError: it cannot be read, or is not a record of this number of workers.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--local-sgd-replay-meetings {path} cannot be read ({error}); give a file that "
            "--local-sgd-record-meetings has written"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            steps = json.loads(line)
        except ValueError:
            steps = None
        if not (isinstance(steps, list) and all(type(each) is int and each >= 1 for each in steps)):
            raise UserError(
                f"--local-sgd-replay-meetings {path}, line {number}: {line[:60]!r} is not a list of the steps that "
                "each worker made, like [3, 5]; give a file that --local-sgd-record-meetings has written"
            )
        if len(steps) != workers:
            raise UserError(
                f"--local-sgd-replay-meetings {path}, line {number}: {len(steps)} workers met, and this run has "
                f"{workers}; give that number to --local-sgd-workers, or drop the option"
            )
        found.append(steps)
    return found
