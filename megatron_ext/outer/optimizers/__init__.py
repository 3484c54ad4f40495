# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers: how anchors move by the common pseudo-gradient; one file each, by name in `all_optimizers`."""
