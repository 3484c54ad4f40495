# SPDX-License-Identifier: Apache-2.0
"""Local SGD without Megatron: for modules under DistributedDataParallel and under FSDP2's `fully_shard`.

The names are those of atorch's README. The wrapped optimizer makes the inner step, then the averager counts it and runs
an outer round when one is due. Whatever synchronises gradients must stay inside a worker: with DDP, torch's
`post_localSGD_hook` with `start_localSGD_iter` = our warm-up; with FSDP2, a mesh of the worker's own ranks.
"""

from megatron_ext.local_sgd.plain_torch.averager import OuterOptimPeriodicModelAverager
from megatron_ext.local_sgd.plain_torch.post_local_sgd import StatefulPostLocalSGDOptimizer
from megatron_ext.local_sgd.plain_torch.state_files import load_local_sgd_state_dict, save_local_sgd_state_dict

__all__ = [
    "OuterOptimPeriodicModelAverager",
    "StatefulPostLocalSGDOptimizer",
    "load_local_sgd_state_dict",
    "save_local_sgd_state_dict",
]
