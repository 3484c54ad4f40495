# SPDX-License-Identifier: Apache-2.0
"""The file of --result-rejected-tracker-filename: iterations whose results Megatron has rejected."""

from pathlib import Path

__all__ = ["write_rejected"]

_LINE = "ts=0 node=a device=0 jobID={} rank=0 iteration={} status=rerun_disabled result=0 message=''\n"


def write_rejected(path: Path, *iterations: int) -> str:
    """Say that two jobs rejected these iterations, as often as Megatron asks for to skip them; return the path."""
    path.write_text("".join(_LINE.format(job, iteration) for iteration in iterations for job in (1, 2)))
    return str(path)
