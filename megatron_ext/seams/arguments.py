# SPDX-License-Identifier: Apache-2.0
"""Seam: Megatron's argument parser and its validation.

These are the only patches that `patch_megatron()` applies before the arguments are known; none of them changes
what a run does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext import async_save
from megatron_ext.batch_size import batch_size_problem, schedule_problem
from megatron_ext.config_options import argument_of, choices_of
from megatron_ext.errors import UserError, combine, in_one_line, report
from megatron_ext.hooks import LoadContext, hooks
from megatron_ext.options import (
    UnknownOption,
    layers_file_problem,
    missing_optimizers,
    unknown_options,
    unknown_problems,
)
from megatron_ext.patching import Patch, PatchRegistry
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.phrases import as_option, meant_option
from megatron_ext.run_options import run_options
from megatron_ext.said_by_megatron import refusals_in_one_line

__all__ = ["add_config_group", "patches", "say", "with_arguments"]


def patches(
    registry: PatchRegistry,
    set_defaults: Callable[[argparse.ArgumentParser], None] | None,
    loops: async_save.WriterLoops,
) -> list[Patch]:
    """Return the patches of this seam.

    Args:
        registry: where the enabled features' own patches are applied once the arguments are known.
        set_defaults: called with the filled parser, to adapt defaults to the backend; None for none.
        loops: what writers of asynchronous checkpoints run on the backend.
    """
    # Once the parser has them: the features', and Megatron's of which the table of options says nothing.
    options: set[str] = set()
    unknown: list[UnknownOption] = []
    return [
        Patch(
            name="arguments/add",
            target="megatron.training.arguments:add_megatron_arguments",
            wrap=lambda original: _wrap_add(original, set_defaults, options, unknown),
            parameters=("parser",),
            reason="add the argument groups of megatron_ext to Megatron's parser",
        ),
        Patch(
            name="arguments/validate",
            target="megatron.training.arguments:validate_args",
            wrap=lambda original: _wrap_validate(original, registry, loops, unknown),
            parameters=("args", "defaults"),
            reason="validate the features' arguments and apply the patches of the enabled features only",
        ),
        Patch(
            name="arguments/yaml",
            target="megatron.training.yaml_arguments:load_yaml",
            wrap=lambda original: _wrap_yaml(original, options, on_cpu=set_defaults is not None),
            parameters=("yaml_path",),
            reason="refuse features with --yaml-cfg, with which Megatron drops the command line and its validation",
        ),
        Patch(
            name="arguments/load",
            target="megatron.training.checkpointing:_load_base_checkpoint",
            wrap=_wrap_load,
            parameters=("load_dir", "args", "rank0"),
            reason="refuse a checkpoint that needs a feature which the arguments do not ask for",
        ),
        Patch(
            name="arguments/errors",
            target="sys:excepthook",
            wrap=in_one_line,
            distribution="python",
            versions="",
            rebind=False,
            may_stay=True,
            reason="show the user's own mistakes as one message instead of a traceback per rank",
        ),
    ]


def add_config_group(parser: argparse.ArgumentParser, config_class: type, title: str) -> None:
    """Add one argument per field of a config dataclass; the fields' docstrings are the help texts.

    Args:
        parser: Megatron's parser.
        config_class: a dataclass whose module does not postpone the evaluation of annotations. Fields whose metadata
            say `without_flag` get no argument.
        title: title of the argument group.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    fields = dataclasses.fields(config_class)
    hidden = [entry.name for entry in fields if entry.metadata.get("without_flag")]
    group = ArgumentGroupFactory(config_class, exclude=hidden).build_group(parser, title=title)
    chosen = {argument_of(entry): names for entry in fields if (names := choices_of(entry)) is not None}
    for action in group._group_actions:
        action.choices = chosen.get(action.dest, action.choices)


@contextmanager
def with_arguments(**values: Any) -> Iterator[None]:
    """Give Megatron's arguments other values for a while."""
    options = run_options()
    before = {name: getattr(options, name) for name in values}
    _set(options, values)
    try:
        yield
    finally:
        _set(options, before)


def _set(options: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(options, name, value)


def say(message: str) -> None:
    """Print one line on the first rank; usable before torch.distributed exists."""
    if os.environ.get("RANK", "0") == "0":
        print(f"> megatron_ext: {message}", flush=True)


def _wrap_add(
    original: Callable[..., Any],
    set_defaults: Callable[[argparse.ArgumentParser], None] | None,
    options: set[str],
    unknown: list[UnknownOption],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        _escape_help(parser)
        unknown[:] = unknown_options(parser)
        before = set(parser._option_string_actions)
        for feature in hooks.features:
            feature.add_arguments(parser)
        options.update(set(parser._option_string_actions) - before)
        if set_defaults is not None:
            set_defaults(parser)
        _refuse_in_one_line(parser)
        return parser

    return add_megatron_arguments


def _refuse_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Let one rank say what is wrong, with what was meant; argparse prints the usage, 800 lines, and on every rank."""

    def error(message: str) -> NoReturn:
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        known = parser._option_string_actions
        options = [word for word in words.split() if word.startswith("--")] if is_unknown else []
        hints = dict.fromkeys(hint for word in options if (hint := meant_option(word, known)))
        report(UserError("; ".join([" ".join(message.split()), *hints])))
        raise SystemExit(2)  # as argparse does: a program that tries command lines catches it

    parser.error = error  # type: ignore[method-assign]  # the parser is made by Megatron, as argparse's own class


def _escape_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs of help texts that argparse cannot expand.

    Megatron 0.19 has one ("1.10 = 10%"), and with it `--help` ends in a ValueError.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            if action.help:
                formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def _wrap_validate(
    original: Callable[..., Any],
    registry: PatchRegistry,
    loops: async_save.WriterLoops,
    unknown: list[UnknownOption],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        hooks.complete_arguments(args)
        problems = [problem for feature in hooks.features for problem in feature.validate(args)]
        sizes = (batch_size_problem(args), schedule_problem(args))
        others = (async_save.missing_writer(args), missing_optimizers(args), layers_file_problem(args), *sizes)
        problems += [problem for problem in others if problem is not None]
        if problems:
            raise combine(problems, "arguments")
        enabled = hooks.enable(args)
        problems = [
            f"{feature.name}: {status.problem}"
            for feature in enabled
            for status in registry.explain(feature.required_patches())
            if status.unavailable and not status.patch.dispensable
        ]
        if enabled:
            problems += unknown_problems(args, unknown)
        if problems:
            raise combine(problems, "arguments")
        for feature in enabled:
            for line in feature.adjust_arguments(args):
                say(line)
            registry.apply(feature.required_patches())
        for unused in (async_save.unused(args), _unused_interval(args)):
            if unused is not None:
                say(unused)
        if hooks.active and async_save.is_asked(args):
            registry.apply(async_save.patches(loops))
        hooks.require_served(patch.serves for patch in registry.applied)
        with refusals_in_one_line("arguments"):
            return original(args, *rest, **kwargs)

    return validate_args


def _unused_interval(args: Any) -> str | None:
    if args.non_persistent_save_interval is None or args.save is not None:
        return None
    return "--non-persistent-save-interval has no effect without --save: nothing is saved"


def _wrap_yaml(original: Callable[..., Any], options: set[str], *, on_cpu: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        if on_cpu:
            raise UserError(
                f"--yaml-cfg {yaml_path} is not supported on CPU: with it Megatron ignores the command line, and with "
                "that the defaults and the checks by which a run works there; give all arguments as flags"
            )
        with refusals_in_one_line(f"--yaml-cfg {yaml_path}", "it"):
            values = original(yaml_path)
        given = {word.split("=")[0] for word in sys.argv[1:]}
        given |= {as_option(name) for name in vars(values)}
        found = sorted(given & options)
        if found:
            raise UserError(
                f"--yaml-cfg {yaml_path}: with it Megatron ignores the command line, so {', '.join(found)} would do "
                "nothing; give all arguments as flags, without --yaml-cfg"
            )
        return values

    return load_yaml


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = bound_with_defaults(signature, args, kwargs).arguments
        try:
            result = original(*args, **kwargs)
        except SystemExit as exit_request:
            tracker = Path(given["load_dir"]) / "latest_checkpointed_iteration.txt"
            if exit_request.code or (given["args"].exit_on_missing_checkpoint and not tracker.exists()):
                raise
            # Megatron ends here with status 0, which a launcher takes for success.
            if given["args"].ckpt_step or _names_a_checkpoint(tracker):
                raise UserError(
                    f"--load {given['load_dir']}: a file of the checkpoint cannot be read, of which Megatron says more "
                    "above; load an earlier one with --ckpt-step"
                ) from None
            raise UserError(
                f"--load {given['load_dir']}: latest_checkpointed_iteration.txt there holds neither a number nor "
                "'release'; write the iteration to load into it, or name it with --ckpt-step"
            ) from None
        state = result[0]
        # Of the legacy format the first rank's file is not always read by itself.
        if state is not None and (given["rank0"] or given["args"].ckpt_format == "torch"):
            hooks.check_load(LoadContext(args=given["args"], directory=result[1], state=state, common_only=True))
        return result

    return load_base_checkpoint


def _names_a_checkpoint(tracker: Path) -> bool:
    text = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
    return text == "release" or text.isdecimal()
