# SPDX-License-Identifier: Apache-2.0
"""The disk: snapshots of rounds, and what makes files durable."""
