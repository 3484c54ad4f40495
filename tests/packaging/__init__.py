# SPDX-License-Identifier: Apache-2.0
"""Tests of the packaging: the set-up scripts, the test command and the wheel."""
