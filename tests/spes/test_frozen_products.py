# SPDX-License-Identifier: Apache-2.0
"""Grouped experts of which some are frozen, module by module, on a double of Transformer Engine."""

import pytest

from tests.support.distributed import run_ranks

pytestmark = pytest.mark.usefixtures("double_of_transformer_engine")

TRAINED = {
    "first": [True, True, False, False],
    "last": [False, False, True, True],
    "every other": [False, True, False, True],
    "none": [False] * 4,
    "all": [True] * 4,
}
WAYS = {
    "gated": {},
    "biases": {"add_bias_linear": True, "gated_linear_unit": False},
    "gradients later": {"later": True},
    "recomputed activations": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
}


def grouped_experts(*, later=False, **options):
    """Four grouped experts."""
    import torch
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    common = {"add_bias_linear": False, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "moe_ffn_hidden_size": 16}
    kind = {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(**{**sizes, **kind, **common, **options})
    # Megatron lets it be said with its own order of passes only, which needs a GPU.
    config.delay_wgrad_compute = later
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TESpecProvider().grouped_mlp_modules(True)(4, config, pg_collection=groups)


def start():
    """A job of one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.params.models import start_cpu
    from tests.support.transformer_engine import accept_transformer_engine

    start_cpu()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    accept_transformer_engine()


def number_of(name):
    """The expert that a parameter is of."""
    return int(name[-1])


def freeze(experts, trained):
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(trained[number_of(name)])


def passed(experts):
    """Two micro-batches through: outputs and the gradients of inputs and routers' weights."""
    import torch

    torch.manual_seed(0)
    found = []
    for counts in ([3, 4, 5, 2], [0, 2, 1, 0]):
        tokens, weights = torch.randn(sum(counts), 8, requires_grad=True), torch.rand(sum(counts), requires_grad=True)
        output, _ = experts(tokens, torch.tensor(counts), weights)
        output.square().sum().backward()
        found += [output.detach(), tokens.grad, weights.grad]
        experts.backward_dw()
        # Megatron's hooks do this.
        for parameter in experts.parameters():
            if parameter.grad is not None:
                parameter.sum_of_gradients = getattr(parameter, "sum_of_gradients", 0) + parameter.grad
                parameter.grad = None
    return found


def compare_all_ways():
    """Hold experts of which some are frozen against those that are all trained."""
    import torch

    from megatron_ext.spes.grouped_experts import train_some_experts

    start()
    for way, options in WAYS.items():
        whole = grouped_experts(**options)
        expected = passed(whole)
        for which, trained in TRAINED.items():
            experts = grouped_experts(**options)
            experts.load_state_dict(whole.state_dict())
            freeze(experts, trained)
            train_some_experts(torch.nn.ModuleList([experts]))
            for ours, theirs in zip(passed(experts), expected, strict=True):
                assert torch.equal(ours, theirs), (way, which)
            named = zip(experts.named_parameters(), whole.named_parameters(), strict=True)
            for (name, ours), (same, theirs) in named:
                assert name == same
                if trained[number_of(name)]:
                    assert torch.equal(ours.sum_of_gradients, theirs.sum_of_gradients), (way, which, name)
                else:
                    assert not hasattr(ours, "sum_of_gradients"), (way, which, name)
            assert list(experts.state_dict()) == list(whole.state_dict())


def test_experts_that_are_trained_get_the_gradients_that_they_get_where_all_are():
    run_ranks(compare_all_ways, 1)


def leave_to_transformer_engine():
    """What becomes of frozen experts without this package."""
    start()
    found = {}
    for which in ("first", "last"):
        experts = grouped_experts()
        freeze(experts, TRAINED[which])
        passed(experts)
        found[which] = [hasattr(parameter, "sum_of_gradients") for _, parameter in experts.named_parameters()]
    return found


def test_transformer_engine_alone_asks_the_first_expert():
    (found,) = run_ranks(leave_to_transformer_engine, 1)
    assert any(found["first"]) and not any(found["last"])


def freeze_a_part():
    """Of an expert."""
    import torch

    from megatron_ext.errors import UserError
    from megatron_ext.spes.grouped_experts import train_some_experts

    start()
    experts = grouped_experts()
    experts.linear_fc2.weight1.requires_grad_(False)
    try:
        train_some_experts(torch.nn.ModuleDict({"experts": experts}))
    except UserError as error:
        return str(error)


def test_an_expert_of_which_a_part_is_frozen_is_refused_by_name():
    (said,) = run_ranks(freeze_a_part, 1)
    assert said == "spes: experts has experts of which a part is frozen; freeze all of an expert or nothing of it"
