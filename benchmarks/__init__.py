# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the project; README.md says what each one measures and how to read it."""
