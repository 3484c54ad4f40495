# SPDX-License-Identifier: Apache-2.0
"""Taking the frames of a contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_ext.sync_service.protocol.frames import Frame
from megatron_ext.sync_service.values.contribution import Contribution, Discarded
from megatron_ext.sync_service.values.failpoints import Failpoints

__all__ = ["receive"]


def receive(
    contribution_of: Callable[[], Contribution | None], frames: Iterable[Frame], failpoints: Failpoints
) -> tuple[bool, int, int]:
    """Take frames of a contribution.

    Args:
        contribution_of: returns where they go, None when they do not count any more; asked again when that was removed.
        frames: what has come.
        failpoints: where to die in tests.

    Returns:
        Whether the round was closed before, and how many frames were taken, and how many were there already.

    Raises:
        Refusal: a frame or the caller is refused; the frames before it are kept.
        OSError: the disk refuses.
    """
    taken = known = 0
    contribution = contribution_of()
    for frame in frames:
        frame.check()
        while contribution is not None:
            try:
                is_new = contribution.append(frame)
                break
            except Discarded:
                contribution = contribution_of()
        else:
            return True, taken, known
        taken, known = taken + is_new, known + (not is_new)
        failpoints.hit("frame_spooled")
    return contribution is None, taken, known
