# SPDX-License-Identifier: Apache-2.0
"""One rank of a job, built by Megatron without the others, without a GPU, and without memory for its tensors."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_ext.activation import registry
from megatron_ext.errors import UserError
from megatron_ext.explain.command_line import in_one_line
from megatron_ext.hooks import Feature, hooks
from megatron_ext.patching import Patch
from megatron_ext.phrases import as_option
from megatron_ext.sync_service.megatron.feature import SyncServiceFeature

__all__ = ["LoneRank", "build", "patches", "without_memory"]

_QUIET = {
    # Nothing is read or written.
    "load": None,
    "pretrained_checkpoint": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "exit_signal_handler": False,
    "async_save": False,
    "moe_use_upcycling": False,
    # There is nobody to meet, and nothing to fill.
    "use_gloo_process_groups": False,
    "perform_initialization": False,
}
"""What of the arguments is other while a rank is built, without a change of any shape."""

_KERNELS = {
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "tp_comm_overlap": False,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "use_precision_aware_optimizer": False,
    "main_grads_dtype": torch.float32,
    "main_params_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "optimizer_cpu_offload": False,
}
"""Likewise, what asks for kernels of a GPU."""

_WITHOUT_ENGINE = {"transformer_impl": "local", "moe_grouped_gemm": False, "fp8_param_gather": False}
"""Likewise, where Transformer Engine is not installed: the same parameters by other classes."""


@dataclass(frozen=True, kw_only=True)
class LoneRank:
    """A rank as it is after Megatron's set-up."""

    asked: Any
    """Megatron's argument namespace as it was validated."""

    args: Any
    """The one of which the rank was built."""

    model: list[Any]
    """The model chunks, wrapped in DDP."""

    optimizer: Any
    """The `MegatronOptimizer`."""

    features: tuple[Feature, ...]
    """Those that the arguments ask for."""


def patches() -> list[Patch]:
    """Return what a rank without others and without memory needs of torch."""
    return [
        Patch(
            name="explain/objects",
            target="torch.distributed.distributed_c10d:all_gather_object",
            wrap=_wrap_gather,
            parameters=("object_list", "obj"),
            distribution="torch",
            versions=">=2.6",
            reason="there are no other ranks to ask: all are taken to say what this one does",
        ),
        Patch(
            name="explain/groups",
            target="torch.distributed.distributed_c10d:new_group",
            wrap=_wrap_new_group,
            parameters=("ranks", "backend", "pg_options"),
            distribution="torch",
            versions=">=2.6",
            reason="groups carry nothing, whatever backend and options Megatron asks for",
        ),
        Patch(
            name="explain/attention",
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            wrap=_wrap_attention,
            parameters=("self", "config"),
            reason="Megatron's own attention stands for Transformer Engine's, which context parallelism needs",
        ),
        Patch(
            name="explain/conversion",
            target="torch.nn.modules.module:Module._apply",
            wrap=_wrap_apply,
            parameters=("self", "fn", "recurse"),
            distribution="torch",
            versions=">=2.6",
            reason="torch converts modules in place, which tensors without memory do not let it",
        ),
    ]


def without_memory() -> Any:
    """Return a context in which tensors have shapes and types, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def build(args: Any) -> LoneRank:
    """Build the rank that the arguments were parsed for; process groups stay.

    Args:
        args: Megatron's argument namespace, validated; what `_QUIET` and the like name is changed.

    Raises:
        UserError: Megatron refuses to build it.
    """
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, initialize, training
    from megatron.training.global_vars import set_global_variables

    if not hasattr(argument_utils, "gpt_config_from_args"):
        raise UserError("in this release of Megatron a script's own function builds the model; explain needs 0.19")
    for option in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if getattr(args, option):
            raise UserError(
                f"{as_option(option)}: the arguments are valid, but ranks with FSDP cannot be built without "
                "memory for tensors; drop the option to have the rest explained"
            )
    registry().apply(patches())
    asked = argparse.Namespace(**vars(args))
    changes: dict[str, Any] = {**_QUIET, **_KERNELS}
    if importlib.util.find_spec("transformer_engine") is None:
        changes.update(_WITHOUT_ENGINE)
    vars(args).update({name: value for name, value in changes.items() if hasattr(args, name)})
    features = hooks.active
    # A job of one rank joins no server.
    hooks.activate(feature for feature in features if not isinstance(feature, SyncServiceFeature))
    with in_one_line("the job", "it"):
        set_global_variables(args)
        dist.init_process_group("fake", store=HashStore(), rank=args.rank, world_size=args.world_size)
        initialize._initialize_distributed(None, None, None)
        initialize._set_random_seed(
            args.seed, args.data_parallel_random_init, args.te_rng_tracker, args.inference_rng_tracker
        )
        settings = argument_utils.pretrain_cfg_container_from_args(args, argument_utils.gpt_config_from_args(args))
        with without_memory():
            model, optimizer, _ = training.setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=settings,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
    asked.padded_vocab_size = args.padded_vocab_size  # with the tokenizer, after the arguments were validated
    return LoneRank(asked=asked, args=args, model=model, optimizer=optimizer, features=features)


def _wrap_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    return all_gather_object


def _wrap_new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        left_out = ("backend", "pg_options", "device_id")
        return original(**{name: value for name, value in given.items() if name not in left_out})

    return new_group


def _wrap_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)
        self.config = config

    return init


def _wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _converted(tensor, fn)
        return self

    return _apply


@torch.no_grad()
def _converted(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a parameter or buffer of another type, with the attributes that Megatron gave it."""
    converted = fn(tensor)
    if converted.dtype == tensor.dtype:
        return tensor
    if isinstance(tensor, torch.nn.Parameter):
        converted = torch.nn.Parameter(converted, tensor.requires_grad)
    vars(converted).update({name: value for name, value in vars(tensor).items() if name not in vars(converted)})
    return converted
