# SPDX-License-Identifier: Apache-2.0
"""Seam: the training loop. Every function here is a module global that the loop looks up when it calls it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.hooks import (
    ChunksBuilt,
    CutsWorkers,
    EvaluationEnd,
    EvaluationStart,
    ModelBuilt,
    RepeatsSteps,
    ReplacesSchedule,
    StepEnd,
    StepStart,
    TrainEnd,
    TrainLeft,
    TrainStart,
    hooks,
)
from megatron_ext.params.fsdp_shards import uneven_rows
from megatron_ext.patching import Patch
from megatron_ext.run_options import run_options
from megatron_ext.seams.arguments import say, with_arguments
from megatron_ext.seams.process_groups import current_groups, seen_by_a_worker
from megatron_ext.transport.lost_rank import lost_rank
from megatron_ext.worker_ending import is_common_end, training_starts

__all__ = ["chunk_patches", "joined_steps", "length_patches", "loop_patches", "model_patches", "patches"]

_MODULE = "megatron.training.training"
_DUMPS = tuple(f"save_{what}_interval" for what in ("params", "activations", "tokens_per_expert", "wgrads", "dgrads"))
"""What is dumped once in an iteration, of its first inner step."""


def chunk_patches() -> list[Patch]:
    """Return the patches for features that change the model before it is wrapped in DDP."""
    return [
        Patch(
            name=f"training/{name}",
            target=target,
            wrap=_wrap_wrapping,
            parameters=(parameter,),
            serves=(ChunksBuilt,),
            reason="let features freeze parameters before gradient buffers are made",
        )
        for name, target, parameter in (
            # Of models from a provider function, and of those from a config.
            ("wrap", f"{_MODULE}:wrap_model_chunks_with_ddp", "model_chunks"),
            ("wrap-configured", "megatron.training.models.dist_utils:_ddp_wrap", "model"),
        )
    ]


def model_patches() -> list[Patch]:
    """Return the patch for features that need the model before the data."""
    return [
        Patch(
            name="training/model",
            target=f"{_MODULE}:setup_model_and_optimizer",
            wrap=_wrap_setup,
            parameters=("model_type",),
            serves=(ModelBuilt,),
            reason="tell features of model and optimizer before the data are built",
        )
    ]


def length_patches() -> list[Patch]:
    """Return the patch for features that train documents of different lengths."""
    return [
        Patch(
            name="training/lengths",
            target=f"{_MODULE}:consume_seqlen_stats_in_iteration",
            wrap=_wrap_lengths,
            serves=(ReplacesSchedule.lengths_of_step,),
            reason="count FLOPs by documents, which all ranks know, without a collective over all of them",
        )
    ]


def loop_patches() -> list[Patch]:
    """Return the patches that tell features of the loop and its steps, and change nothing."""
    return [
        Patch(
            name="training/train",
            target=f"{_MODULE}:train",
            wrap=_wrap_train,
            parameters=("model", "optimizer", "opt_param_scheduler", "config"),
            serves=(TrainStart, TrainEnd, TrainLeft),
            reason="tell features that training starts and ends",
        ),
        Patch(
            name="training/step",
            target=f"{_MODULE}:train_step",
            wrap=_wrap_step,
            parameters=("forward_backward_func", "iteration"),
            serves=(StepStart, StepEnd, ReplacesSchedule.forward_backward, RepeatsSteps.another_step),
            reason="tell features about every step, and let them run its forward and backward passes",
        ),
    ]


def patches() -> list[Patch]:
    """Return the patches of the loop of a job with workers."""
    return [
        *loop_patches(),
        Patch(
            name="training/evaluate",
            target=f"{_MODULE}:evaluate",
            wrap=_wrap_evaluate,
            parameters=("model",),
            serves=(EvaluationStart, EvaluationEnd),
            reason="evaluate on the weights that were asked for, and average the loss over all workers",
        ),
        Patch(
            name="training/flops",
            target=f"{_MODULE}:num_floating_point_operations",
            wrap=_wrap_flops,
            parameters=("args", "batch_size"),
            serves=(RepeatsSteps.batches_of_iteration,),
            reason="count the floating-point operations of all inner steps of an iteration",
        ),
        Patch(
            name="training/exit",
            target=f"{_MODULE}:checkpoint_and_decide_exit",
            wrap=_wrap_exit,
            parameters=("iteration",),
            serves=(CutsWorkers.may_exit,),
            reason="all ranks vote on ending the run (signal, duration) at every iteration; where workers do not meet, "
            "they do so at the one that they have agreed on without waiting for each other",
        ),
        Patch(
            name="training/timers",
            target="megatron.core.timers:Timers.__call__",
            wrap=_wrap_timers,
            parameters=("name", "log_level"),
            rebind=False,
            reason="timers with a barrier must not make workers wait for each other at every step",
        ),
    ]


def _wrap_wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrap_model_chunks(*args: Any, **kwargs: Any) -> Any:
        chunks = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        hooks.fire(ChunksBuilt(args=run_options(), chunks=chunks))
        return original(*args, **kwargs)

    return wrap_model_chunks


def _wrap_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        model, optimizer, scheduler = built
        hooks.fire(ModelBuilt(args=run_options(), model=model, optimizer=optimizer, scheduler=scheduler))
        return built

    return setup_model_and_optimizer


def _wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        training_starts()
        _require_rows_that_can_be_saved(given["model"], given["config"])
        hooks.fire(
            TrainStart(
                args=run_options(),
                model=given["model"],
                optimizer=given["optimizer"],
                scheduler=given["opt_param_scheduler"],
                config=given["config"],
            )
        )
        try:
            with _keeping_the_hook_of_gradients(given["config"]):
                result = original(*args, **kwargs)
        except BaseException as error:  # features hear of every end, and it is raised again
            hooks.fire(TrainLeft(error=error))
            lost = lost_rank(error)
            if lost is not None:
                raise lost from error
            raise
        hooks.fire(TrainEnd())
        return result

    return train


def _require_rows_that_can_be_saved(model: Sequence[Any], config: Any) -> None:
    """Refuse at the start what Megatron 0.19 refuses at the first checkpoint, with what was trained until then.

    Raises:
        UserError: FSDP2 has cut a tensor into parts of unequal numbers of rows, and the run saves.
    """
    options = run_options()
    if not (options.save and options.use_torch_fsdp2):
        return
    for chunk in model:
        problem = uneven_rows(chunk, gated=config.gated_linear_unit)
        if problem is not None:
            raise UserError(f"--use-torch-fsdp2 with --save: {problem}, or drop --save")


@contextmanager
def _in_place_of(name: str, instead: Callable[[Any], Any]) -> Iterator[None]:
    """Let the loop's module find something else under a name.

    Args:
        name: a global of the module.
        instead: given what is there, returns what is to be found.
    """
    from megatron.training import training

    module: Any = training
    stock = getattr(module, name)
    setattr(module, name, instead(stock))
    try:
        yield
    finally:
        setattr(module, name, stock)


def _keeping_the_hook_of_gradients(config: Any) -> AbstractContextManager[None]:
    """Let `train` keep the function that features have put into `config.finalize_model_grads_func`.

    Megatron 0.18 puts its own in its place, which it looks up here; later releases do so where there is none.
    """
    return _in_place_of("finalize_model_grads", lambda stock: config.finalize_model_grads_func or stock)


def _inside_the_worker(step: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return a step that averages the losses which it reports over the worker's ranks.

    Since Megatron 0.19 the groups are those of the step's model; before, it knows those of `parallel_state` alone.
    """
    if "pg_collection" in signature.parameters:
        return step

    def inside(**given: Any) -> Any:
        with _in_place_of("mpu", seen_by_a_worker):
            return step(**given)

    return inside


def _wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    step = _inside_the_worker(original, signature)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        hooks.fire(StepStart(iteration=iteration))
        given["forward_backward_func"] = hooks.forward_backward(given["forward_backward_func"])
        # (losses, skipped, should_checkpoint, should_exit, ...): a step that asks to exit made no update.
        with _dumping_by_worker():
            results = [step(**given)]
        while not results[-1][3] and hooks.another_step(len(results)):
            with _without_dumps():
                results.append(step(**given))
        result = results[0] if len(results) == 1 else joined_steps(results)
        hooks.fire(_step_end(iteration, result, results))
        return result

    return train_step


@contextmanager
def _dumping_by_worker() -> Iterator[None]:
    """Give each worker a folder of its own for what a step dumps; the step itself saves nothing else.

    Megatron's files are named by the rank inside a model's parallel groups, which every worker has.
    """
    options = run_options()
    dumps = options.save and any(getattr(options, name, None) for name in _DUMPS)
    if not dumps or hooks.worker_count(options) == 1:
        yield
        return
    with with_arguments(save=os.path.join(options.save, f"worker_{current_groups().worker}")):
        yield


def _without_dumps() -> AbstractContextManager[None]:
    return with_arguments(**{name: None for name in _DUMPS if hasattr(run_options(), name)})


def joined_steps(results: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what Megatron's loop is told of an iteration of several inner steps.

    Losses are the mean over the steps that the optimizer has made, or over all where it has made none: then the
    iteration is a skipped one. The largest attention logit is that of all, the rest (the gradient's norm) the last's.

    Args:
        results: what `train_step` has returned for each of them.
    """
    made = [result for result in results if not result[1]] or results
    losses = {name: sum(result[0][name] for result in made) / len(made) for name in made[-1][0]}
    *rest, logit = results[-1][2:]
    if isinstance(logit, (int, float)):
        logit = max(result[-1] for result in results)
    return losses, int(all(result[1] for result in results)), *rest, logit


def _step_end(iteration: int, result: tuple[Any, ...], results: Sequence[tuple[Any, ...]]) -> StepEnd:
    return StepEnd(
        iteration=iteration,
        completed=not result[3],
        losses=result[0],
        steps=len(results),
        skipped=sum(bool(each[1]) for each in results),
        non_finite=sum(bool(each[1]) and not _all_finite(each[0]) for each in results),
    )


def _all_finite(losses: dict[str, Any]) -> bool:
    return all(bool(loss.isfinite().all()) for loss in losses.values())


def _wrap_flops(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def num_floating_point_operations(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if signature.bind(*args, **kwargs).arguments.get("total_real_tokens_in_batch") is not None:
            return found  # tokens that were counted are those of all steps already
        batches = hooks.batches_of_iteration()
        return found if batches == 1 else found * batches

    return num_floating_point_operations


def _wrap_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def consume_seqlen_stats_in_iteration() -> Any:
        lengths = hooks.lengths_of_step()
        if lengths is None:
            return original()
        return float(sum(lengths)), float(sum(length * length for length in lengths))

    return consume_seqlen_stats_in_iteration


def _wrap_evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.utils import get_attr_wrapped_model

        model = signature.bind(*args, **kwargs).arguments["model"]
        collection = get_attr_wrapped_model(model[0], "pg_collection")
        hooks.fire(EvaluationStart(model=model))
        # The validation samples are split over all workers, so the loss is averaged over all of them.
        inside = collection.dp_cp
        collection.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        try:
            # An evaluation that a time limit ends leaves the model in evaluation mode, as the run is about to end. Here
            # it may continue to an iteration that all come to; what is asked after the evaluation decides.
            with with_arguments(exit_duration_in_mins=None):
                return original(*args, **kwargs)
        finally:
            collection.dp_cp = inside
            hooks.fire(EvaluationEnd(model=model))

    return evaluate


def _wrap_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        # Whoever wanted to end still does where all vote, so that each vote ends the run.
        if hooks.may_exit(iteration) or is_common_end(iteration, say):
            return original(*args, **kwargs)
        with with_arguments(exit_signal_handler=False, exit_duration_in_mins=None):
            return original(*args, **kwargs)

    return checkpoint_and_decide_exit


def _wrap_timers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        timer = original(self, *args, **kwargs)
        if getattr(timer, "_barrier_group", self) is None:
            timer.set_barrier_group(current_groups().inside)
        return timer

    return call
