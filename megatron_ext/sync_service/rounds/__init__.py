# SPDX-License-Identifier: Apache-2.0
"""Membership and rounds as state machines, and the journal that they are rebuilt from."""
