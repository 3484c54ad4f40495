# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a process beside each rank writes while training continues (`--async-save`)."""

from megatron_ext.async_save.seam import is_asked, missing_writer, patches, unused
from megatron_ext.async_save.writer_process import LOOPS, WriterLoops, mcore_loop, nvrx_loop

__all__ = ["LOOPS", "WriterLoops", "is_asked", "mcore_loop", "missing_writer", "nvrx_loop", "patches", "unused"]
