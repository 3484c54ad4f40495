# SPDX-License-Identifier: Apache-2.0
"""Tests of megatron_ext. A package, so that every rank process can import a test's functions by name."""
