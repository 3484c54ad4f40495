# SPDX-License-Identifier: Apache-2.0
"""Loading the extension that Megatron compiles when it first needs it: `python -m tests.support.extension`."""

import shutil

from megatron_ext.quietly import quietly

__all__ = ["load_extension"]


def load_extension() -> None:
    """Compile it if that has not been done, where that can be done, and load it.

    A rank that is killed while it looks whether that is compiled leaves a lock, on which all others wait forever.
    """
    from megatron.core.tensor_parallel import random
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

    load = getattr(random, "_get_share_storage", None)  # some releases have none
    if load is not None and is_ninja_available() and shutil.which(get_cxx_compiler()):
        with quietly():
            load()


if __name__ == "__main__":
    load_extension()
