# SPDX-License-Identifier: Apache-2.0
"""From a dense model to a mixture of experts that starts as that model: sparse upcycling (arXiv 2212.05055).

Every MLP becomes experts that are copies of it, or of its slices (fine-grained experts). Their outputs are weighted by
a softmax over the experts that a token is given to, so the weights sum to one; copies without noise then compute what
the dense MLP does, whatever the router says, and training begins at the dense model's loss.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ext.convert.dtypes import fitting, trained_dtype
from megatron_ext.convert.families import carried_fields, family_for
from megatron_ext.convert.flags import settings_of
from megatron_ext.convert.hf_reader import read_json
from megatron_ext.convert.megatron_args import read_args
from megatron_ext.convert.model_sources import Source, checkpoint_folder, open_checkpoint
from megatron_ext.convert.release import Converted, Step, write_release
from megatron_ext.convert.settings import ModelSettings
from megatron_ext.convert.upcycle_config import UpcycleConfig
from megatron_ext.convert.whole_folder import identity
from megatron_ext.errors import UserError
from megatron_ext.legacy_format.legacy_folder import is_legacy
from megatron_ext.params import GlobalTensor
from megatron_ext.params.gpt import OUTPUT_WEIGHT, WORD_EMBEDDING
from megatron_ext.params.parameter_names import split_global_name

__all__ = ["upcycle"]

def upcycle(
    source: Path,
    target: Path,
    config: UpcycleConfig,
    *,
    iteration: int | None = None,
    overwrite: bool = False,
    step: Step | None = None,
) -> Converted:
    """Write a mixture of experts made of a dense model's checkpoint, for Megatron's --load in any layout.

    Args:
        source: the dense model's checkpoint, in the torch_dist format: of a job, or what `from_hf` has written.
        target: the mixture's, which begins at iteration 0.
        config: how.
        iteration: of the source; None for the newest.
        overwrite: whether what an earlier conversion wrote in `target` is replaced.
        step: is told of each tensor that is written.

    Raises:
        UserError: the source is not a dense model, cannot be read, or cannot become this mixture.
    """
    folder = checkpoint_folder(source, iteration)
    if is_legacy(folder):
        raise UserError(
            f"{folder}: in the legacy format; load it without --ckpt-format torch, and save, or go by way of to-hf and "
            "from-hf"
        )
    reader = open_checkpoint(folder)
    dense = settings_of(read_args(folder))
    config.check(dense)
    settings = config.settings(dense)
    rows = reader.shape(WORD_EMBEDDING)[0]
    shape = settings.shape(trained_dtype(reader.dtype(WORD_EMBEDDING), folder))
    shape = replace(shape, padded_vocab_size=rows)
    value = _values(reader, config, dense.ffn_hidden_size // config.granularity)

    return write_release(
        target,
        settings,
        shape,
        lambda tensor: fitting(value(tensor), tensor.dtype, tensor.name, fix="give less noise"),
        {"upcycle": asdict(config), "of": identity([folder / ".metadata"])},
        source={"SOURCE": source},
        tokenizer=source / "tokenizer",
        hf_config=_hf_config(settings, source / "hf_config.json"),
        overwrite=overwrite,
        step=step,
    )


def _values(source: Source, config: UpcycleConfig, width: int) -> Callable[[GlobalTensor], torch.Tensor]:
    """What the mixture's tensors are; `width` is that of one expert."""
    dense = functools.lru_cache(maxsize=2)(source.read)

    def value(tensor: GlobalTensor) -> torch.Tensor:
        layer, expert, leaf = split_global_name(tensor.name)
        mlp = f"decoder.layers.{layer}.mlp."
        if leaf == "mlp.router.weight":
            return _router(tensor, config, lambda: dense(f"{mlp}linear_fc2.weight"))
        if tensor.name == OUTPUT_WEIGHT and tensor.name not in source:
            return source.read(WORD_EMBEDDING)
        if expert is None:
            return source.read(tensor.name)
        begin = expert % config.granularity * width
        whole = dense(f"{mlp}{leaf}")
        if leaf == "linear_fc1.weight":
            gate, up = whole.chunk(2)
            made = torch.cat([gate[begin : begin + width], up[begin : begin + width]])
        else:
            # The weights of the slices of one copy sum to a part of what a whole copy would have.
            made = whole[:, begin : begin + width].float() * config.granularity
        return _with_noise(made, tensor, config)

    return value


def _router(tensor: GlobalTensor, config: UpcycleConfig, second: Callable[[], torch.Tensor]) -> torch.Tensor:
    if config.router_init == "zeros":
        return torch.zeros(tensor.shape)
    std = config.router_std if config.router_init == "normal" else float(second().float().std())
    return std * torch.randn(tensor.shape, generator=_generator(tensor, config))


def _with_noise(values: torch.Tensor, tensor: GlobalTensor, config: UpcycleConfig) -> torch.Tensor:
    if config.noise_std == 0 or config.noise_fraction == 0:
        return values
    generator = _generator(tensor, config)
    chosen = torch.rand(values.shape, generator=generator) < config.noise_fraction
    noise = config.noise_std * torch.randn(values.shape, generator=generator)
    return torch.where(chosen, values.float() + noise, values.float())


def _generator(tensor: GlobalTensor, config: UpcycleConfig) -> torch.Generator:
    """Of its own for each tensor, so that none depends on which were made before."""
    return torch.Generator().manual_seed(zlib.crc32(tensor.name.encode(), config.seed))


def _hf_config(settings: ModelSettings, dense: Path) -> dict[str, Any] | None:
    """The configuration for the way back; None where no family can say the mixture."""
    try:
        family, written = family_for(settings)
    except UserError:
        return None
    former = read_json(dense) if dense.exists() else {}
    return {**carried_fields(former, family.model_type), **written}
