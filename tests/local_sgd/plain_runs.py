# SPDX-License-Identifier: Apache-2.0
"""Local SGD on ordinary modules: a small model, its samples, and an optimizer that is wrapped for it."""

import torch

GUARD = {"skip_anomaly": True, "ewma_warmup_steps": 2, "pseudo_gradnorm_reduce": True, "clip_pseudo_grad": 10.0}


def model():
    """Return the same small model each time, also to threads that build theirs at once."""
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            bound = (parameter.shape[1] if parameter.dim() == 2 else parameter.shape[0]) ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
    return module


def batch(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 3, generator=generator)


def train(module, optimizer, steps, number, start=0):
    for step in range(start, steps):
        inputs, targets = batch(step, number)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()


def wrapped(
    inner,
    names=None,
    *,
    interval=1,
    warmup=0,
    groups=None,
    outer=None,
    gta=None,
    streaming=None,
    total=None,
    buffers="average",
    inners="same",
    **fields,
):
    """Return an inner optimizer wrapped for local SGD."""
    from megatron_ext.local_sgd import GTAConfig, LocalSGDConfig, OuterOptimizerConfig, StreamingConfig
    from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager, StatefulPostLocalSGDOptimizer

    across, inside = groups or (None, None)
    averager = OuterOptimPeriodicModelAverager(
        across,
        local_sgd_config=LocalSGDConfig(local_sgd_sync_interval=interval, local_sgd_warmup_steps=warmup, **fields),
        outer_optim_config=OuterOptimizerConfig(**(outer or {})),
        gta_config=GTAConfig(**(gta or {})),
        streaming_config=StreamingConfig(**(streaming or {})),
        shard_group=inside,
        total_global_steps=total,
        buffers=buffers,
        inner_optimizers=inners,
    )
    return StatefulPostLocalSGDOptimizer(inner, averager, names)


def ddp(start_local):
    """Return a module under DDP whose gradients are synchronous for `start_local` iterations."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

    module = torch.nn.parallel.DistributedDataParallel(model())
    state = PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=start_local, post_local_gradient_allreduce=False
    )
    module.register_comm_hook(state, post_localSGD_hook)
    return module


def flat(module):
    return torch.cat([value.detach().reshape(-1) for value in module.parameters()]).tolist()


def said_by(act):
    """Return what the user's error says that `act` ends with; nothing without one."""
    from megatron_ext.errors import UserError

    try:
        act()
    except UserError as error:
        return str(error)
    return ""
