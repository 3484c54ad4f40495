# SPDX-License-Identifier: Apache-2.0
"""Under atorch's name: local SGD for modules under DistributedDataParallel, which is `plain_torch`."""

from megatron_ext.local_sgd.plain_torch import OuterOptimPeriodicModelAverager, StatefulPostLocalSGDOptimizer

__all__ = ["OuterOptimPeriodicModelAverager", "StatefulPostLocalSGDOptimizer"]
