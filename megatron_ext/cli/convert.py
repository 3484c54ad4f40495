# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext convert`: models from Hugging Face's folders to Megatron's checkpoints and back."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.convert.dtypes import DTYPES
from megatron_ext.convert.upcycle_config import UpcycleConfig
from megatron_ext.data.progress import megabytes
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatron_ext.convert.release import Converted

__all__ = ["add_parser"]

_FROM_HF = """\
Write a Hugging Face model as a torch_dist checkpoint that stock Megatron loads with --load, whatever TP,
PP and EP the job has. Training begins at iteration 0 with a new optimizer. The flags that make the model
are printed, and are in OUT/megatron_flags.txt, one word a line.

Families: llama, qwen2, qwen3, mixtral, qwen3_moe, qwen2_moe, olmoe, deepseek_v3, deepseek_v2. What of
the configuration has no counterpart in Megatron is refused by name; --ignore says that it has no meaning
for the model. A conversion that was cut off, started again with the same options, resumes after the files
that are whole.
"""

_TO_HF = """\
Write a model as a Hugging Face folder that transformers loads with from_pretrained.

SOURCE is
  - a folder given to --save, or one iteration in it: of a stock job, of a job with local SGD, or of a SPES
    peer, in the torch_dist format or the legacy one, whatever TP, PP and EP it has;
  - the folder of a sync service, DIR, or DIR/runs/RUN, or a file round-N.safetensors in it: no peer is
    needed. A snapshot does not say how its tensors are used, so --hf-config has to.

What of the model the family cannot say is refused by name. A conversion that was cut off, started again
with the same options, resumes after the files that are whole.
"""

_UPCYCLE = """\
Write a mixture of experts that starts as a dense model: every MLP becomes experts that are copies of it.
SOURCE is a checkpoint in the torch_dist format (for a Hugging Face model, what from-hf has written); OUT is
one for --load, in any layout, which begins at iteration 0. The flags that make the mixture are printed.

Without noise the mixture computes what the dense model does, whatever its router says: a token's experts
are weighted by a softmax over those it is given to. With --granularity above 1 that holds only where a
token is given to all slices of a copy with equal weights.
"""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LOG_SECONDS = 10.0


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "convert",
        help="models from and to Hugging Face",
        description="Bring models in from Hugging Face and out, and make a mixture of experts of a dense one.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_from_hf(actions)
    _add_to_hf(actions)
    _add_upcycle(actions)


def _add_from_hf(actions: Any) -> None:
    parser = actions.add_parser(
        "from-hf",
        help="Hugging Face model to checkpoint",
        description=_FROM_HF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder with config.json and safetensors files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the checkpoint, for --load")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the parameters (default: that of the model)")
    parser.add_argument(
        "--vocab-multiple",
        type=int,
        default=1,
        metavar="N",
        help="pad the vocabulary with rows of zeros to a multiple of N, which TP has to divide (default: 1, none)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="NAME",
        help="field of config.json, or pattern of tensors' names, to leave out; may be repeated",
    )
    parser.add_argument(
        "--mtp", action="store_true", help="take layers of multi-token prediction, too (num_nextn_predict_layers)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote in OUT")
    parser.set_defaults(func=_from_hf)


def _add_to_hf(actions: Any) -> None:
    parser = actions.add_parser(
        "to-hf",
        help="checkpoint or snapshot to Hugging Face model",
        description=_TO_HF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint, or folder of a sync service")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the Hugging Face model")
    parser.add_argument("--iteration", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--weights",
        default="model",
        metavar="WHICH",
        help="model (default): what stock Megatron reads; with local SGD also anchor, the parameters last "
        "synchronised, and worker:N, those of one worker",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="model type of the result (default: the first that can say all)"
    )
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="PATH",
        help="a model of the same architecture, or a checkpoint that was made of one: its config.json and tokenizer "
        "are taken",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the tokenizer for the model (default: that of --hf-config, else SOURCE's)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: that of the source)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the vocabulary that are kept, to leave out Megatron's padding (default: where a conversion wrote "
        "SOURCE those of its model, else those of --hf-config, else all)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights, as 500MB (default: 5GB)"
    )
    parser.add_argument(
        "--drop-mtp", action="store_true", help="leave out layers of multi-token prediction (--mtp-num-layers)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote in OUT")
    parser.set_defaults(func=_to_hf)


def _add_upcycle(actions: Any) -> None:
    parser = actions.add_parser(
        "upcycle",
        help="dense checkpoint to mixture of experts",
        description=_UPCYCLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint of a dense model")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the mixture's checkpoint, for --load")
    parser.add_argument("--iteration", type=int, metavar="N", help="of the source (default: the newest)")
    add_fields(parser, UpcycleConfig)
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier conversion wrote in OUT")
    parser.set_defaults(func=_upcycle)


def _from_hf(options: argparse.Namespace) -> int:
    from megatron_ext.convert.from_hf import from_hf

    if options.vocab_multiple < 1:
        raise UserError(f"--vocab-multiple {options.vocab_multiple}: give a whole number of at least 1")
    made = from_hf(
        options.model,
        options.out,
        dtype=_dtype(options.dtype),
        divisor=options.vocab_multiple,
        ignored=options.ignore,
        mtp=options.mtp,
        overwrite=options.overwrite,
        step=_Steps("reading"),
    )
    _tell(made)
    return 0


def _upcycle(options: argparse.Namespace) -> int:
    from megatron_ext.convert.upcycle import upcycle

    made = upcycle(
        options.source,
        options.out,
        from_options(UpcycleConfig, options),
        iteration=options.iteration,
        overwrite=options.overwrite,
        step=_Steps("writing"),
    )
    _tell(made)
    if not (made.folder / "hf_config.json").exists():
        print("no Hugging Face layout that is known can say this mixture: to-hf will refuse it")
    return 0


def _tell(made: Converted) -> None:
    """Say what was made, and how Megatron takes it."""
    print(f"{made.folder}: a checkpoint for --load, {made.parameters:,} parameters in {_short(made.dtype)}")
    print("Megatron's flags for the model (also in megatron_flags.txt):")
    print("  " + shlex.join(made.flags))
    if "--tokenizer-model" not in made.flags:
        print("no tokenizer went with it: give Megatron its own --tokenizer-type")
    _tell_ids(made.folder / "tokenizer", made.settings.vocab_size)


def _tell_ids(tokenizer: Path, rows: int) -> None:
    """Say so if a tokenizer that was beside a model knows more tokens than the model."""
    from megatron_ext.convert.tokenizer_files import largest_id

    largest = largest_id(tokenizer)
    if largest is not None and largest >= rows:
        print(f"the tokenizer that went with it has ids up to {largest}, and the model {rows} rows: as in the source")


def _to_hf(options: argparse.Namespace) -> int:
    from megatron_ext.convert.to_hf import ToHf, to_hf

    made = to_hf(
        ToHf(
            source=options.source,
            target=options.out,
            iteration=options.iteration,
            weights=options.weights,
            family=options.family,
            config=options.hf_config,
            tokenizer=options.tokenizer,
            dtype=_dtype(options.dtype),
            vocab_size=options.vocab_size,
            max_shard_bytes=_bytes_of(options.max_shard_size),
            drop_mtp=options.drop_mtp,
            overwrite=options.overwrite,
        ),
        _Steps("writing"),
    )
    print(
        f"{made.folder}: a {made.family.model_type} model, {made.tensors} tensors, {made.parameters:,} parameters in "
        f"{_short(made.dtype)}"
    )
    if options.dtype is None and made.described not in (None, str(made.dtype).removeprefix("torch.")):
        print(f"their type is the source's; the configuration says {made.described}, which --dtype can choose")
    if made.padding:
        print(f"{made.padding} rows that pad the vocabulary were left out")
    if not made.has_tokenizer:
        print("no tokenizer went with it; --tokenizer DIR adds one")
    if not made.has_former:
        print("its config.json names no special tokens, as SOURCE knows none; --hf-config MODEL takes those of MODEL")
    _tell_ids(made.folder, made.vocab_size)
    return 0


class _Steps:
    """Says on standard error how much was moved: in place on a terminal, now and then elsewhere."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._bytes = self._tensors = 0
        self._last = time.monotonic()

    def __call__(self, name: str, nbytes: int) -> None:
        self._bytes += nbytes
        self._tensors += 1
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._last < (0.2 if terminal else _LOG_SECONDS):
            return
        self._last = now
        text = f"{self._word} {name}: {self._tensors} tensors, {megabytes(self._bytes)}"
        print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def _short(dtype: torch.dtype) -> str:
    return {f"torch.{long}": short for short, long in DTYPES.items()}.get(str(dtype), str(dtype))


def _bytes_of(size: str) -> int:
    digits = size.rstrip("KMGBkmgb")
    unit = size[len(digits) :].upper()
    if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
        raise UserError(f"--max-shard-size {size}: give a number and KB, MB or GB, as 5GB")
    return int(digits) * _UNITS[unit]
