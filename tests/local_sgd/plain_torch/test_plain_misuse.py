# SPDX-License-Identifier: Apache-2.0
"""What local SGD on ordinary modules refuses, and what it says then."""

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.plain_runs import model, train, wrapped
from tests.support.distributed import run_ranks

MISUSE = {
    "interval": ({"local_sgd_sync_interval": 0}, {}, "local SGD: local_sgd_sync_interval is 0"),
    "workers": ({"local_sgd_workers": 7}, {}, "local_sgd_workers is 7, and process_group has 1 ranks"),
    "eager reducer": (
        {"local_sgd_sync_interval": 2},
        {"gta_config": {"reducer": "gta"}, "streaming_config": {"eager": True}},
        "local SGD: eager takes the plain mean; drop GTAConfig",
    ),
    "streamed pairs": (
        {},
        {"gta_config": {"reducer": "pairwise"}, "streaming_config": {"update_alpha": 0.5}},
        "reducer pairwise is not combined with StreamingConfig; drop them",
    ),
    "asynchronous streaming": (
        {"use_async": True},
        {"streaming_config": {"update_alpha": 0.5}},
        "local SGD: use_async has rounds of the whole model; drop StreamingConfig",
    ),
    "reducer": (
        {},
        {"gta_config": {"reducer": "GTA"}},
        "local SGD: reducer is 'GTA'; it must be 'linear' or 'gta' or 'pairwise' or None",
    ),
    "pattern": (
        {},
        {"streaming_config": {"fragments": 2, "pattern": "diagonal"}},
        "local SGD: pattern is 'diagonal'; it must be 'strided' or 'sequential'",
    ),
    "evaluation": (
        {"local_sgd_evaluation": "sinced"},
        {},
        "local SGD: local_sgd_evaluation is 'sinced'; it must be 'synced' or 'workers'",
    ),
    "method": (
        {},
        {"gta_config": {"reducer": "gta", "consensus_method": "vote"}},
        "local SGD: consensus_method is 'vote'; it must be 'sum' or 'count' or None",
    ),
    "codec": ({"codec": "int2"}, {}, "local SGD: codec is 'int2'; it must be 'bf16' or 'fp16' or"),
    "whole number": ({"local_sgd_sync_interval": 2.5}, {}, "local_sgd_sync_interval is 2.5; it must be a whole number"),
    "text": ({"local_sgd_sync_interval": "8"}, {}, "local_sgd_sync_interval is '8'; it must be a whole number"),
    "flag": ({"skip_anomaly": 1}, {}, "local SGD: skip_anomaly is 1; it must be True or False"),
    "number": ({"clip_pseudo_grad": True}, {}, "local SGD: clip_pseudo_grad is True; it must be a number or None"),
    "total": ({}, {"total_global_steps": 10}, "total_global_steps has no effect without use_async"),
    "fragments": (
        {},
        {"streaming_config": {"fragments": 4}},
        "fragments is 4; it must be at most the model's layers 3",
    ),
    "dtype": ({}, {}, "parameter 0.weight is torch.bfloat16; local SGD averages fp32 parameters"),
    "unattached": ({}, {}, "the averager knows no parameters"),
    "group": ({}, {}, "parameters cannot be added"),
    "file": ({}, {}, "/nowhere/local_sgd_ckpt_rank0.pt: no such file"),
    "wait": ({}, {}, "wait() is for workers of an asynchronous run"),
}


def misused():
    """Return by kind of misuse what the error says."""
    from megatron_ext.errors import UserError
    from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, StreamingConfig
    from megatron_ext.local_sgd.plain_torch import (
        OuterOptimPeriodicModelAverager,
        StatefulPostLocalSGDOptimizer,
        load_local_sgd_state_dict,
    )

    dist.init_process_group("gloo")
    classes = {"gta_config": GTAConfig, "streaming_config": StreamingConfig}
    said = {}
    for how, (fields, others, _) in MISUSE.items():
        module = model().bfloat16() if how == "dtype" else model()
        given = {name: classes[name](**value) if name in classes else value for name, value in others.items()}
        try:
            averager = OuterOptimPeriodicModelAverager(local_sgd_config=LocalSGDConfig(**fields), **given)
            if how == "unattached":
                averager.average_parameters()
            optimizer = StatefulPostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), averager, module)
            if how == "group":
                optimizer.add_param_group({"params": []})
            if how == "wait":
                averager.wait()
            load_local_sgd_state_dict(optimizer, "/nowhere")
        except UserError as error:
            said[how] = str(error)
    return said


@pytest.fixture(scope="module")
def refusals():
    """What is said to every misuse."""
    return run_ranks(misused, 1)[0]


@pytest.mark.parametrize("how", MISUSE)
def test_misuse_is_refused_with_the_way_out(how, refusals):
    assert MISUSE[how][-1] in refusals[how]


def differing():
    """Return what is said where workers do not have the same parameters, in the same memory, for one optimizer."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), []
    module = model()

    def tried(act):
        try:
            act()
        except UserError as error:
            said.append(str(error))

    parameters = list(module.parameters())
    tried(lambda: wrapped(torch.optim.SGD(parameters[:: -1 if rank else 1], lr=0.1)))
    tried(lambda: wrapped(torch.optim.SGD(parameters[rank:], lr=0.1), module))
    optimizer = wrapped(torch.optim.SGD(parameters, lr=0.1), module)
    tried(lambda: optimizer.averager.attach(module.named_parameters()))
    module[2].weight.data = module[2].weight.data.clone()
    tried(lambda: train(module, optimizer, 1, rank))
    return said


def test_workers_must_have_the_same_parameters_in_the_memory_that_they_had():
    for other, fewer, again, moved in run_ranks(differing, 2):
        assert "parameter0 of shape [16, 8] on worker 0 is parameter0 of shape [3] on worker 1; build model" in other
        assert "0.weight of shape [16, 8] on worker 0 is 0.bias of shape [16] on worker 1" in fewer
        assert "the averager has its parameters already" in again
        assert "parameter 2.weight has other memory than when local SGD began" in moved
