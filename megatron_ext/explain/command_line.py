# SPDX-License-Identifier: Apache-2.0
"""A command line through the parser and the checks of a run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.activation import registry
from megatron_ext.errors import UserError
from megatron_ext.explain.config import ExplainConfig
from megatron_ext.patching import Patch
from megatron_ext.said_by_megatron import refusals_in_one_line

__all__ = ["CAPABILITY", "in_one_line", "parse"]

CAPABILITY = (9, 0)
"""Of the GPU that options are checked against, as of an H100."""

_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""Of Megatron's pretrain_gpt.py."""


def parse(asked: ExplainConfig, rank: int) -> Any:
    """Return the validated arguments as a rank of the job has them.

    Raises:
        UserError: Megatron or a feature refuses them.
    """
    from megatron.training import arguments

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(asked.world_size),
        LOCAL_RANK=str(rank % asked.nproc_per_node),
        LOCAL_WORLD_SIZE=str(asked.nproc_per_node),
    )
    sys.argv = ["megatron-ext explain", *asked.words]
    with _as_elsewhere(asked), in_one_line("arguments"):
        args = arguments.parse_args()
        if args.yaml_cfg is not None:
            raise UserError(f"--yaml-cfg {args.yaml_cfg}: files of arguments are not explained; give flags")
        if args.use_checkpoint_args:
            from megatron.training.checkpointing import load_args_from_checkpoint

            load_args_from_checkpoint(args)
        arguments.validate_args(args, dict(_DEFAULTS))
    return args


@contextmanager
def _as_elsewhere(asked: ExplainConfig) -> Iterator[None]:
    """Let Megatron find the GPU and the packages that the run will have, where this machine has none."""
    found = []
    if asked.backend == "cuda":
        found.append(
            Patch(
                name="explain/capability",
                target="torch.cuda:get_device_capability",
                wrap=lambda original: lambda *args, **kwargs: CAPABILITY,
                distribution="torch",
                versions=">=2.6",
                reason="options are checked against the GPU of the run",
            )
        )
    if asked.backend == "cuda" and importlib.util.find_spec("transformer_engine") is None:
        found.append(
            Patch(
                name="explain/engine",
                target="megatron.core.utils:is_te_min_version",
                wrap=lambda original: lambda *args, **kwargs: True,
                reason="options are checked against the Transformer Engine of the run",
            )
        )
    registry().apply(found)
    try:
        yield
    finally:
        registry().revert(patch.name for patch in found)


@contextmanager
def in_one_line(place: str, it: str = "them") -> Iterator[None]:
    """Turn what Megatron, or its parser, says of bad input into one line.

    Args:
        place: what was being checked.
        it: what stands for that in a sentence.

    Raises:
        UserError: in place of the error, or of the exit.
    """
    try:
        with refusals_in_one_line(place, it):
            yield
    except SystemExit as error:  # of argparse, which has printed what is wrong
        said = [line for line in _printed().splitlines() if ": error: " in line]
        raise UserError(said[-1].partition(": error: ")[2] if said else f"{place}: exit status {error.code}") from None


def _printed() -> str:
    """Return what was written to standard error, where it is kept."""
    getvalue = getattr(sys.stderr, "getvalue", None)
    return str(getvalue()) if getvalue is not None else ""
