# SPDX-License-Identifier: Apache-2.0
"""Linear layers."""

import torch

from transformer_engine.pytorch.base import WithWeights, mark_split
from transformer_engine.pytorch.norms import norm_parameters, normalised


class Linear(WithWeights):
    """Whole, or split over tensor-parallel ranks by columns or rows."""

    def __init__(self, in_features, out_features, *, sequence_parallel=False, tp_group=None, tp_size=1, **weights):
        super().__init__(tp_group=tp_group, **weights)
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        split = {"column": (self.tp_size, 1), "row": (1, self.tp_size), None: (1, 1)}[self.parallel_mode]
        assert out_features % split[0] == 0 and in_features % split[1] == 0
        self.out_features, self.in_features = out_features // split[0], in_features // split[1]
        self.weight = self.draw_weight(self.out_features, self.in_features)
        self.bias = self.make_bias(self.out_features)
        if self.use_bias and self.parallel_mode == "column":
            mark_split(self.bias, 0)
        elif self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        group = self.tp_group
        if self.parallel_mode == "column" and self.tp_size > 1:
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        y = self.times(x, self.weight)
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
        *,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        return_layernorm_output=False,
        device,
        params_dtype,
        **linear,
    ):
        super().__init__(in_features, out_features, device=device, params_dtype=params_dtype, **linear)
        assert not return_layernorm_output
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(
            in_features,
            has_bias=normalization == "LayerNorm",
            sequence_parallel=self.sequence_parallel,
            zero_centered_gamma=zero_centered_gamma,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(self, x, is_first_microbatch=None):
        norm = normalised(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        return super().forward(norm, is_first_microbatch)


class GroupedLinear(WithWeights):
    """Several linear layers, each for its own part of the rows; their parameters are numbered.

    Whether weights get gradients, the first one decides for all of them.
    """

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        sequence_parallel=False,
        tp_size=1,
        ub_name=None,
        delay_wgrad_compute=False,
        **weights,
    ):
        super().__init__(**weights)
        assert tp_size == 1, "Megatron communicates outside of this module"
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.put_aside = [] if delay_wgrad_compute else None
        self.wgrad_accumulation_and_reduce_hooks = []
        for number in range(num_gemms):
            setattr(self, f"weight{number}", self.draw_weight(out_features, in_features))
            setattr(self, f"bias{number}", self.make_bias(out_features))
            if delay_wgrad_compute:
                for kind in ("weight", "bias"):
                    getattr(self, f"{kind}{number}").skip_backward_post_hook = True

    def init_fp8_metadata(self, num_gemms):
        """There is none."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def forward(self, x, m_splits, is_first_microbatch=None):
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        weights, biases = self._of_kind("weight"), self._of_kind("bias")
        has_gradients = weights[0].requires_grad
        if has_gradients and self.fuse_wgrad_accumulation:
            assert all(weight.main_grad is not None for weight in weights)
        parts = torch.split(x.reshape(-1, x.shape[-1]), list(m_splits))
        out = []
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            product = self.times(part, weight) if has_gradients else self.times(part, weight.detach())
            has_bias = self.use_bias and not self.return_bias
            out.append(product + bias if has_bias else product)
        y = torch.cat(out)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        if self.return_bias:
            return y, biases
        return y

    def times(self, x, weight):
        if self.put_aside is None or not weight.requires_grad:
            return super().times(x, weight)
        return _PutAside.apply(x, weight, self.put_aside)

    def backward_dw(self):
        """Compute the gradients of the weights of the oldest micro-batch that is left."""
        if self.put_aside is None:
            return
        assert len(self.put_aside) >= self.num_gemms, "pop from an empty store"
        for _ in range(self.num_gemms):
            weight, gradient = self.put_aside.pop(0)
            if self.fuse_wgrad_accumulation:
                weight.main_grad.add_(gradient.to(weight.main_grad.dtype))
            else:
                weight.grad = gradient
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def _of_kind(self, kind):
        return [getattr(self, f"{kind}{number}") for number in range(self.num_gemms)]


class _PutAside(torch.autograd.Function):
    """A product whose weight's gradient waits in a list until it is asked for."""

    @staticmethod
    def forward(ctx, x, weight, store):
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.store = weight, store
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.store.append((ctx.parameter, gradient.flatten(0, -2).T @ x.flatten(0, -2)))
        return gradient @ weight, None, None
