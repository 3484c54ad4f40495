# SPDX-License-Identifier: Apache-2.0
"""Attention."""

import contextlib

import torch
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch.base import Module


class DotProductAttention(Module):
    """Causal attention over sequences of one length, (positions, sequences, heads, channels), or of several.

    Those are (positions, heads, channels) with the format "thd", and begin where `cu_seqlens` says.
    """

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        attn_mask_type="causal",
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        softmax_scale=None,
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        return_max_logit=False,
    ):
        super().__init__()
        assert attention_type == "self"
        self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.groups = (num_gqa_groups or num_attention_heads) // tp_size
        channels = self.channels[0]
        self.scale = channels**-0.5 if softmax_scale is None else softmax_scale
        self.dropout, self.sequence_parallel = attention_dropout, sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.set_tensor_parallel_group(tp_group)
        self.cp_group = cp_group
        self.return_max_logit = return_max_logit

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format="sbhd",
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type="causal",
        pad_between_seqs=None,
    ):
        assert self.cp_group is None, "the double has no attention over parts of sequences"
        assert attention_mask is None or attention_mask.dtype == torch.bool
        tensors = (query_layer, key_layer, value_layer)
        assert all(tensor.stride(-1) == 1 for tensor in tensors)
        assert (key_layer.shape[-1], value_layer.shape[-1]) == self.channels
        assert key_layer.shape[-2] == value_layer.shape[-2] == self.groups
        if qkv_format == "sbhd":
            assert attn_mask_type == "causal" and all(tensor.dim() == 4 for tensor in tensors)
            # Attended together, (sequences, heads, positions, channels).
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in tensors)
            out = self._attend(query, key, value).permute(2, 0, 1, 3).flatten(2)
            return (out, self._largest_logits(query, key)) if self.return_max_logit else out
        assert not self.return_max_logit
        assert qkv_format == "thd" and attn_mask_type == "padding_causal"
        assert all(tensor.dim() == 3 for tensor in tensors)
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None and not pad_between_seqs
        lengths = cu_seqlens_q.diff().tolist()
        assert cu_seqlens_kv.diff().tolist() == lengths and sum(lengths) == query_layer.shape[0]
        assert max(lengths) <= max_seqlen_q and max_seqlen_kv == max_seqlen_q
        out = []
        for parts in zip(*(tensor.split(lengths) for tensor in tensors), strict=True):
            out.append(self._attend(*(part.transpose(0, 1)[None] for part in parts))[0].transpose(0, 1))
        return torch.cat(out).flatten(1)

    def _largest_logits(self, query, key):
        """The largest scaled score of each head."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.float() @ key.float().transpose(2, 3) * self.scale
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -torch.inf).amax(dim=(0, 2, 3))

    def _attend(self, query, key, value):
        dropout = self.dropout if self.training else 0.0
        draws = dropout and not self.sequence_parallel and self.get_rng_state_tracker is not None
        with self.get_rng_state_tracker().fork() if draws else contextlib.nullcontext():
            return scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
