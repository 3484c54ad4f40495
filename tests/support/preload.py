# SPDX-License-Identifier: Apache-2.0
"""What the fork server does once, so that a rank starts in milliseconds instead of ten seconds.

That is, above all, importing what every rank, or every rank of a feature, imports.

What importing `megatron_ext` does, a rank does not see for that reason: tests of that start processes of their own.
Nothing here may start a thread or touch process groups: the ranks are forked from this process.
"""

import functools
import gc
import importlib
import logging

import torch

from megatron_ext.options.unknown import unknown_options
from megatron_ext.quietly import quietly
from tests.support.extension import load_extension
from tests.support.parsers import full_parser

MODULES = (
    "megatron.core",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.helpers",
    "megatron.core.datasets.masked_dataset",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo",
    "megatron.core.optimizer",
    "megatron.core.tokenizers.text",  # with all of transformers, where that is installed
    "megatron.core.tokenizers.text.models",
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.datasets.data_samplers",
    "megatron.training.models",
    "megatron.training.training",
    "megatron.training.yaml_arguments",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.utils.serialization.config",
    "megatron_ext.__main__",
    "megatron_ext.activation",
    "megatron_ext.backends.cpu.feature",
    "megatron_ext.hot_switch.feature",
    "megatron_ext.hot_switch.runtime.guest",
    "megatron_ext.hot_switch.runtime.step",
    "megatron_ext.local_sgd.feature",
    "megatron_ext.outer.reducers.linear",
    "megatron_ext.params.live_model",
    "megatron_ext.params.optimizer_shards",
    "megatron_ext.seams.datasets",
    "megatron_ext.seams.writers_queue",
    "megatron_ext.spes.feature",
    "megatron_ext.sync_service.megatron.feature",
    "megatron_ext.sync_service.megatron.workers",
    "megatron_ext.sync_service.peer.client",
)


def _import_quietly() -> None:
    """Keep what the packages say about absent GPU libraries out of the tests' output."""
    with quietly():
        _import_optimizers()
        for name in MODULES:
            _import(name)


def _import(name: str) -> None:
    """Import a module, unless it is one of Megatron's that the release lacks."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith("megatron.") or not f"{name}.".startswith(f"{error.name}."):
            raise


def _import_optimizers() -> None:
    """Leave the root logger to Megatron's loop, which sends messages to standard output.

    absl, with which emerging-optimizers comes, would send them to standard error when Megatron imports it.
    """
    placeholder = logging.NullHandler()
    logging.root.addHandler(placeholder)
    importlib.import_module("megatron.core.optimizer")
    logging.root.removeHandler(placeholder)


def _remember_docstrings() -> None:
    """Parse the docstrings of all config classes once, instead of three times in every rank.

    Megatron builds its parser that often in one start, and finds the help texts in its source code each time.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    original = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(original)
    def remembered(self: ArgumentGroupFactory, config_class: type) -> dict[str, str]:
        if config_class not in known:
            known[config_class] = original(self, config_class)
        return dict(known[config_class])

    ArgumentGroupFactory._get_field_docstrings = remembered
    # What the package remembers of Megatron's options and of the installed packages, all ranks have in common.
    unknown_options(full_parser())


def _shrink_mock_data() -> None:
    """Leave 2 million tokens of Megatron's mock data: every rank shuffles the samples of all 200 million otherwise."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1_000


def _look_for_copies() -> None:
    """Let the registry find once what Megatron's modules hold, instead of in every rank."""
    from megatron_ext.activation import registry

    registry().apply([])


torch.set_num_threads(1)
_import_quietly()
load_extension()
_look_for_copies()
_remember_docstrings()
_shrink_mock_data()
# Ranks need not look for garbage among what they have in common: looking alone would copy all of its memory.
gc.collect()
gc.freeze()
