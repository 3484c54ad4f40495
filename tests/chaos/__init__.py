# SPDX-License-Identifier: Apache-2.0
"""Runs of the sync service under a seeded mixture of faults, whose history is checked against a small model.

`python -m tests.chaos --seed 7 --minutes 3`; docs/chaos.md says what is checked.
"""
