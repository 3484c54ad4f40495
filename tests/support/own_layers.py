# SPDX-License-Identifier: Apache-2.0
"""Layers of one's own for `--spec`: Megatron's local ones, which norm queries and keys without weights."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

layers = get_gpt_layer_local_spec(qk_l2_norm=True)
