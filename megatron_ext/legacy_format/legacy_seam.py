# SPDX-License-Identifier: Apache-2.0
"""Seam: checkpoints in Megatron's legacy format.

There is no request of a read in it, and only the first data-parallel ranks write: a rank's file has the name of its
tensor, pipeline and expert indices. So features are asked on all ranks before Megatron writes and reads, may have
files of their own beside Megatron's, and may move a worker's files into a folder, where they are those of any job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import RankFiles, SaveContext, SaveEnd, SavesState, SaveStart, hooks
from megatron_ext.legacy_format.legacy_layout import refuse_other_layout
from megatron_ext.legacy_format.rank_file import write_rank_file
from megatron_ext.patching import Patch
from megatron_ext.patching.bound_arguments import bound_with_defaults
from megatron_ext.run_options import run_options

__all__ = ["LEGACY", "patches"]

LEGACY = "torch"
"""What `--ckpt-format` calls the format."""

_MODULE = "megatron.training.checkpointing"
_STATES = ("model", "optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")
"""What Megatron's entries that a job resumes from begin with."""


class _State:
    """What this rank is saving or loading; Megatron does one at a time."""

    files: RankFiles | None = None
    """Of the checkpoint being written, or read."""

    added: dict[str, Any] | None = None
    """What features add to the state dict being written."""

    loading: dict[str, Any] | None = None
    """The arguments of the `load_checkpoint` that is under way."""

    common: Any = None
    """What was found when the first rank's file was read in it."""

    read: Any = None
    """What this rank's file held, and whether it was a release's."""


_state = _State()


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="legacy/save",
            target=f"{_MODULE}:save_checkpoint",
            wrap=_wrap_save,
            parameters=("iteration", "model", "optimizer", "opt_param_scheduler", "release"),
            serves=(SaveStart, SaveEnd, SavesState.save_state),
            reason="in the legacy format only some ranks make a state dict, and features are asked on all",
        ),
        Patch(
            name="legacy/generate",
            target=f"{_MODULE}:generate_state_dict",
            wrap=_wrap_generate,
            reason="add the state of features to what a rank writes in the legacy format",
        ),
        Patch(
            name="legacy/load",
            target=f"{_MODULE}:load_checkpoint",
            wrap=_wrap_load,
            parameters=("ddp_model", "optimizer", "opt_param_scheduler"),
            reason="in the legacy format nothing asks for what is read: know the model that it is for",
        ),
        Patch(
            name="legacy/read",
            target=f"{_MODULE}:_load_base_checkpoint",
            wrap=_wrap_read,
            parameters=("load_dir", "args", "rank0", "checkpointing_context"),
            reason="let features say which file of the legacy format this rank reads, after they saw the first one",
        ),
        Patch(
            name="legacy/iteration",
            target=f"{_MODULE}:read_metadata",
            wrap=_wrap_metadata,
            parameters=("tracker_filename",),
            reason="Megatron 0.19 asks again which checkpoint is the newest, and resumes there with the distributed "
            "optimizer of that one, whatever --ckpt-step says",
        ),
        Patch(
            name="legacy/name",
            target=f"{_MODULE}:get_checkpoint_name",
            wrap=_wrap_name,
            parameters=("tensor_rank", "pipeline_rank", "expert_rank", "return_base_dir", "basename"),
            reason="give the files of workers in the legacy format folders of their own",
        ),
    ]


@contextmanager
def _under_way() -> Iterator[None]:
    """Forget at the end what was saved or loaded."""
    try:
        yield
    finally:
        _state.files = _state.added = _state.loading = _state.common = _state.read = None


def _wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        save = save_files if run_options().ckpt_format == LEGACY else original
        result = save(*args, **kwargs)
        hooks.fire(SaveEnd())
        return result

    def save_files(*args: Any, **kwargs: Any) -> Any:
        run, given = run_options(), bound_with_defaults(signature, args, kwargs).arguments
        files = _files(Path(_folder(run.save, given["iteration"], given["release"])))
        with _under_way():
            hooks.fire(SaveStart())
            context = _context(run, given["model"], given, files, loading=False)
            # Before Megatron writes: its last act is to call the checkpoint the newest one, which has to be whole then.
            hooks.save_state(context)
            _state.files, _state.added = files, context.state
            return original(*args, **kwargs)

    return save_checkpoint


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = original(*args, **kwargs)
        files, added = _state.files, _state.added
        if files is None or added is None:
            return state
        state.update(added)
        if files.leaves_head:
            _write({key: value for key, value in state.items() if not key.startswith(_STATES)}, files)
        return state

    return generate_state_dict


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        with _under_way():
            _state.loading, _state.common = bound_with_defaults(signature, args, kwargs).arguments, None
            return original(*args, **kwargs)

    return load_checkpoint


def _wrap_read(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = bound_with_defaults(signature, args, kwargs).arguments
        run = given["args"]
        if given["rank0"]:
            _state.common = original(*args, **kwargs)
            return _state.common
        if _state.loading is None:
            return original(*args, **kwargs)
        if _state.common is None:
            from megatron.training import checkpointing

            # The function with all of its wrappers, which tell features.
            checkpointing._load_base_checkpoint(
                given["load_dir"], run, rank0=True, checkpointing_context=given["checkpointing_context"]
            )
        state, name, release, kind = _state.common
        if state is None or kind.name != "LEGACY":
            if state is not None and run.ckpt_format == LEGACY:
                raise UserError(
                    f"--load {given['load_dir']}: its newest checkpoint is not one of --ckpt-format torch, which reads "
                    "no other; drop the option: the default, torch_dist, reads both, and saves in its own"
                )
            return original(*args, **kwargs)
        refuse_other_layout(state, run, given["load_dir"])
        files = _files(Path(name).parent.parent)
        wants_states = not (release or run.finetune or run.no_load_optim)
        loading = _state.loading
        context = _context(run, loading["ddp_model"], loading if wants_states else {}, files, loading=True)
        hooks.save_state(context)
        _state.files = files
        _require(files, given["load_dir"])
        result = original(*args, **kwargs)
        result[0].update(context.state)
        _state.read = result[0], result[2]
        return result

    return load_base_checkpoint


def _wrap_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read_metadata(*args: Any, **kwargs: Any) -> Any:
        if _state.read is None:
            return original(*args, **kwargs)
        state, release = _state.read
        return state["iteration"], release

    return read_metadata


def _wrap_name(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_checkpoint_name(*args: Any, **kwargs: Any) -> str:
        given = bound_with_defaults(signature, args, kwargs).arguments
        named = [given[name] for name in ("pipeline_parallel", "tensor_rank", "pipeline_rank", "expert_rank")]
        # With an index it is another rank's.
        if _state.files is None or given["return_base_dir"] or any(index is not None for index in named):
            return str(original(*args, **kwargs))
        return str(_state.files.path(given["basename"]))

    return get_checkpoint_name


def _folder(directory: str, iteration: int, release: bool) -> str:
    from megatron.training.checkpointing import get_checkpoint_name

    return str(get_checkpoint_name(directory, iteration, release=release, return_base_dir=True))


def _files(base: Path) -> RankFiles:
    from megatron.training.checkpointing import get_checkpoint_name

    return RankFiles(base=base, own=Path(get_checkpoint_name(str(base), 0)).parent.name)


def _context(run: Any, model: Any, given: dict[str, Any], files: RankFiles, *, loading: bool) -> SaveContext:
    from megatron.training.checkpointing import unwrap_model

    return SaveContext(
        args=run,
        model=unwrap_model(model),
        optimizer=given.get("optimizer"),
        scheduler=given.get("opt_param_scheduler"),
        state={},
        metadata={},
        loading=loading,
        files=files,
    )


def _write(state: dict[str, Any], files: RankFiles) -> None:
    """Put a state dict where Megatron looks."""
    from megatron.training.checkpointing import get_checkpoint_name

    write_rank_file(state, files.path(Path(get_checkpoint_name("", 0)).name, part=""))


def _require(files: RankFiles, directory: str) -> None:
    """Check that this rank's file is there.

    Raises:
        UserError: it is not; Megatron ends with status 0 then.
    """
    from megatron.training.checkpointing import get_checkpoint_name

    path = Path(get_checkpoint_name(str(files.base), 0))
    if not path.is_file():
        raise UserError(f"--load {directory}: {path} is missing; load an earlier checkpoint with --ckpt-step")
