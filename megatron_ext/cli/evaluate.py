# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext evaluate`: perplexity and tasks of a Hugging Face model, beside other models'."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_ext.cli.dataclass_options import add_fields, from_options
from megatron_ext.convert.dtypes import DTYPES
from megatron_ext.errors import UserError
from megatron_ext.evaluation.perplexity_config import PerplexityConfig

__all__ = ["add_parser"]

_DESCRIPTION = """\
Measure a Hugging Face model (of a checkpoint: what `megatron-ext convert to-hf` has written): its perplexity
on a part of a .bin/.idx corpus, its results in tasks of lm-evaluation-harness, or both. Prints a table, and
writes JSON and a picture, beside the results of other models.
"""

_EPILOG = """\
Examples:
  megatron-ext evaluate OUT --data corpus --part test --sequence-length 4096 --output out.json
  megatron-ext evaluate OUT --tasks sciq:0,arc_challenge:25 --baseline dense.json --picture bars.png
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="perplexity and tasks of a model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a Hugging Face model")
    parser.add_argument("--name", help="what table and picture call it (default: the folder's name)")
    parser.add_argument("--device", default="auto", help="as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES, *DTYPES.values()),
        default="auto",
        help="of its weights (default: that of its files)",
    )
    corpus = parser.add_argument_group("perplexity")
    corpus.add_argument("--data", metavar="PREFIX", help="of a .bin/.idx corpus")
    add_fields(corpus, PerplexityConfig)
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument(
        "--tasks", metavar="NAME[:SHOTS],...", help="of lm-evaluation-harness, each with SHOTS solved examples"
    )
    tasks.add_argument("--task-files", type=Path, metavar="DIR", help="folder of further tasks in YAML")
    tasks.add_argument("--limit", type=int, metavar="N", help="questions of each task (default: all)")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE", help="JSON file for results, replaced if it has some")
    output.add_argument(
        "--baseline",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="results to compare with; may be repeated",
    )
    output.add_argument("--picture", type=Path, metavar="FILE", help="PNG or SVG file with a bar for each model")
    parser.set_defaults(func=_run)


def _run(options: argparse.Namespace) -> int:
    if options.data is None and options.tasks is None:
        raise UserError("evaluate: give --data PREFIX, --tasks NAMES, or both")
    if not (options.model / "config.json").exists():
        raise UserError(
            f"{options.model}: not a Hugging Face model (no config.json); `megatron-ext convert to-hf` makes one of a "
            "checkpoint"
        )
    from megatron_ext.evaluation.lm_tasks import check_tasks, parse_tasks, run_tasks
    from megatron_ext.evaluation.loaded_model import check_data, load_model
    from megatron_ext.evaluation.outputs import check_outputs
    from megatron_ext.evaluation.results import Results, draw, read_results, table

    check_outputs(options.output, options.picture, options.baseline)
    baselines = [read_results(path) for path in options.baseline]
    named = [] if options.tasks is None else parse_tasks(options.tasks)
    manager = check_tasks(named, options.task_files) if named else None
    unchecked = None if options.data is None else check_data(options.data, options.model)
    if unchecked is not None:
        print(unchecked, file=sys.stderr)
    model = load_model(options.model, _device(options.device), DTYPES.get(options.dtype, options.dtype))
    perplexity = {} if options.data is None else _perplexity(options, model)
    found = {}
    if named:
        found = run_tasks(
            model, options.model, named, manager=manager, limit=options.limit, batch_size=options.batch_size
        )
    results = Results(
        name=options.name or options.model.resolve().name,
        model=str(options.model),
        perplexity=perplexity,
        tasks=found,
    )
    if options.output is not None:
        results.write(options.output)
    for line in table([*baselines, results]):
        print(line)
    if options.picture is not None:
        draw([*baselines, results], options.picture)
    return 0


def _perplexity(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    from megatron_ext.evaluation.perplexity import measure_perplexity

    config = from_options(PerplexityConfig, options)

    def tell(tokens: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{tokens:,} tokens", end="", file=sys.stderr, flush=True)

    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and config.sequence_length > positions:
        print(
            f"--sequence-length {config.sequence_length} is beyond the {positions} positions that the model was made "
            "for (max_position_embeddings): later tokens are predicted from more than it has seen",
            file=sys.stderr,
        )
    measured = measure_perplexity(model, options.data, config, tell)
    said = {name: getattr(config, name) for name in ("split", "part", "sequence_length")}
    return {"data": options.data, **said, **measured}


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: torch knows no such device") from error
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:  # the latter from a build without that kind of device
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise UserError(f"--device {name}: torch cannot compute on it here ({reason})") from error
    return name
