# SPDX-License-Identifier: Apache-2.0
"""Strategies and their buckets: what they are, how users write them, and their problems."""
