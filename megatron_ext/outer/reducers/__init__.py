# SPDX-License-Identifier: Apache-2.0
"""Reducers: how the workers' pseudo-gradients become one; one file each, by name in `all_reducers`."""
