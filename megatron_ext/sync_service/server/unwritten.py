# SPDX-License-Identifier: Apache-2.0
"""What peers send and the disk refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.sync_service.disk.durable import described
from megatron_ext.sync_service.shards.remote_shard import ShardProblem

__all__ = ["Unwritten"]

log = logging.getLogger(__name__)


class Unwritten:
    """Remembers, until something can be written again, that what peers of a run send could not be."""

    def __init__(self, name: str) -> None:
        """Begin with nothing.

        Args:
            name: the run id.
        """
        self._name = name
        self.problem = ""
        """In words; empty when there is none."""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Say it in the log, once, and remember it, when the disk refuses what is done meanwhile."""
        try:
            yield
        except ShardProblem:
            raise  # its status says so
        except OSError as error:
            said, self.problem = self.problem, f"what peers send cannot be written: {described(error)}"
            if said != self.problem:
                log.error("run %s: %s", self._name, self.problem)
            raise
        self.problem = ""
