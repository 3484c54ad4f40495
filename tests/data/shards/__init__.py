# SPDX-License-Identifier: Apache-2.0
"""Tests of the shards of token ids."""
