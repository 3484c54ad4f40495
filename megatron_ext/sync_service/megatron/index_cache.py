# SPDX-License-Identifier: Apache-2.0
"""Peers that share a corpus build Megatron's indices of its samples one after the other.

The first rank of a job writes them beside the corpus, or to --data-cache-path, where they are not there yet; the other
ranks of that job wait for it, but peers are jobs of their own. One peer would read a file that another one is writing,
or have one cut off that it has mapped, which kills it (SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.patching import Patch
from megatron_ext.seams.arguments import say

__all__ = ["LOCK_NAME", "patches"]

LOCK_NAME = "megatron_ext.lock"
"""Name of the file in a folder of indices that whoever builds some holds a lock on."""

_REASON = "peers that share a corpus would read indices that another one is writing, or be killed when it rewrites them"


_BUILDERS = {
    "data/index-cache": "gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
    "data/index-cache-blends": "blended_dataset:BlendedDataset._build_indices",
    "data/index-cache-masked": "masked_dataset:MaskedWordPieceDataset._build_sample_index",
}
"""What builds indices unless they are there, by the patch's name."""


def patches() -> list[Patch]:
    """Return the patches of the functions that build indices unless they are there."""
    return [
        Patch(
            name=name,
            target=f"megatron.core.datasets.{builder}",
            wrap=_wrap_build,
            parameters=("self",),
            reason=_REASON,
        )
        for name, builder in _BUILDERS.items()
    ]


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        folder = _cache_of(self)
        if folder is None or (dist.is_initialized() and dist.get_rank() != 0):
            return original(self, *args, **kwargs)
        with _alone_in(folder):
            return original(self, *args, **kwargs)

    return build


def _cache_of(dataset: Any) -> Path | None:
    """Return the folder in which Megatron keeps the indices of a dataset, None if it keeps none."""
    config = dataset.config
    if config.path_to_cache is not None:
        return Path(config.path_to_cache)
    if getattr(config, "mock", False) or not hasattr(dataset, "dataset"):  # a blend's are kept there only
        return None
    return Path(dataset.dataset.path_prefix, "cache", f"{type(dataset).__name__}_indices")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other peers from building in a folder until the end of the block, where that can be."""
    handle = _opened(folder)
    is_taken = handle is not None and _take(handle, folder)
    try:
        yield
    finally:
        if handle is not None:
            if is_taken:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile has the handle too
            os.close(handle)


def _opened(folder: Path) -> int | None:
    """Return the handle of a folder's lock, which is made; None where this job may not write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        # Then it builds nothing here either: it reads what is there, or Megatron says that it cannot write.
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return None
        raise


def _take(handle: int, folder: Path) -> bool:
    """Take a lock, and return whether there are any."""
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another job builds or reads indices in {folder}; this one waits until it is done")
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        say(
            f"warning: {folder}: this file system has no locks ({error.strerror}), so that peers that start together "
            "may read each other's unfinished indices; give each peer a --data-cache-path of its own, or start one "
            "peer before the others"
        )
        return False
    return True
