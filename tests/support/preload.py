# SPDX-License-Identifier: Apache-2.0
"""What the fork server imports once, so that a rank starts in milliseconds instead of ten seconds.

`megatron_ext` is not among it: it is small, and a rank must see for itself what importing it does. Nothing
here may start a thread or touch process groups: the ranks are forked from this process.
"""

import importlib
import logging
import warnings

import torch

MODULES = (
    "megatron.core",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.datasets.data_samplers",
    "megatron.training.models.gpt",
    "megatron.training.training",
    "pytest",
    "torch.distributed.checkpoint",
)


def _import_quietly() -> None:
    """Keep what the packages say about absent GPU libraries out of the tests' output."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
    logging.disable(logging.NOTSET)


torch.set_num_threads(1)
_import_quietly()
