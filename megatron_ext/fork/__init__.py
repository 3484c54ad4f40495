# SPDX-License-Identifier: Apache-2.0
"""A fork of Megatron: which seams fit its source, and the lines with which it calls our wrappers itself.

Its source is read, never imported.
"""
