# SPDX-License-Identifier: Apache-2.0
"""Finding out which file of a torch_dist checkpoint is not what it was."""

from __future__ import annotations

from pathlib import Path

__all__ = ["damaged_file"]


def damaged_file(folder: Path) -> str | None:
    """Return in words which file of a checkpoint is missing or cut off; None when all have the bytes that they should.

    Args:
        folder: of one iteration, on a local disk.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for name in (".metadata", "metadata.json", "common.pt"):
        file = folder / name
        if not file.is_file():
            if name == "common.pt":  # not every release of Megatron writes one
                continue
            return f"{file} is missing"
        if file.stat().st_size == 0:
            return f"{file} is empty"
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:  # whatever unpickling damaged bytes raises
        return f"{folder / '.metadata'} is damaged ({type(error).__name__})"
    needed: dict[str, int] = {}
    for place in (stored or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size < size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
    return None
