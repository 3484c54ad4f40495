# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

import torch

from transformer_engine.pytorch.base import Module, initialised, mark_split
from transformer_engine.pytorch.norms import normalised


class Linear(Module):
    """Whole, or split over tensor-parallel ranks by columns or rows."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        rng_tracker_name=None,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation, "the double does not fuse the accumulation of gradients"
        assert parallel_mode in (None, "column", "row")
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        split = {"column": (self.tp_size, 1), "row": (1, self.tp_size), None: (1, 1)}[parallel_mode]
        assert out_features % split[0] == 0 and in_features % split[1] == 0
        self.out_features, self.in_features = out_features // split[0], in_features // split[1]
        self.use_bias, self.return_bias = bias, return_bias
        self.weight = initialised(
            self,
            (self.out_features, self.in_features),
            init_method=init_method,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            device=device,
            dtype=params_dtype,
        )
        mark_split(self.weight, 1 if parallel_mode == "row" else 0)
        self.bias = torch.empty(0, device=device, dtype=params_dtype)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, device=device, dtype=params_dtype))
            if parallel_mode == "column":
                mark_split(self.bias, 0)
            elif parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        group = self.tp_group
        if self.parallel_mode == "column" and self.tp_size > 1:
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        y = torch.nn.functional.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            if self.sequence_parallel:
                y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=group)
            else:
                y = mappings.reduce_from_tensor_model_parallel_region(y, group=group)
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    """A norm, whose parameters are this module's own, and a linear layer split by columns."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        *,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        sequence_parallel=False,
        device,
        params_dtype,
        **kwargs,
    ):
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            device=device,
            params_dtype=params_dtype,
            **kwargs,
        )
        assert not return_layernorm_output
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, device=device, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros_like(self.layer_norm_weight))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        norm = normalised(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return super().forward(norm, is_first_microbatch)


class GroupedLinear(Module):
    """Several linear layers, each for its own part of the rows; their parameters are numbered."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_name=None,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation, "the double does not fuse the accumulation of gradients"
        assert tp_size == 1, "Megatron communicates outside of this module"
        self.set_tensor_parallel_group(tp_group)
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        for number in range(num_gemms):
            weight = initialised(
                self,
                (out_features, in_features),
                init_method=init_method,
                get_rng_state_tracker=get_rng_state_tracker,
                rng_tracker_name=rng_tracker_name,
                device=device,
                dtype=params_dtype,
            )
            mark_split(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{number}", weight)
            zeros = torch.zeros(out_features if bias else 0, device=device, dtype=params_dtype)
            setattr(self, f"bias{number}", torch.nn.Parameter(zeros) if bias else zeros)

    def init_fp8_metadata(self, num_gemms):
        """There is none."""

    def forward(self, x, m_splits, is_first_microbatch=None):
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        parts = torch.split(x.reshape(-1, x.shape[-1]), list(m_splits))
        out = []
        for number, part in enumerate(parts):
            bias = getattr(self, f"bias{number}") if self.use_bias and not self.return_bias else None
            out.append(torch.nn.functional.linear(part, getattr(self, f"weight{number}"), bias))
        y = torch.cat(out)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        if self.return_bias:
            return y, [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
        return y
