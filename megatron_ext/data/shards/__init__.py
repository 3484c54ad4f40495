# SPDX-License-Identifier: Apache-2.0
"""Texts to shards of token ids, as SPES' own `tokenize_data.py` writes them."""
