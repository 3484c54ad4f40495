# SPDX-License-Identifier: Apache-2.0
"""Prints the support table as Markdown."""

from megatron_ext.support import markdown

if __name__ == "__main__":
    print(markdown(), end="")
