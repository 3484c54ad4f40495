# SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's options work with which ability or backend: one table for the code and for the docs.

The table covers the options that touch data parallelism, optimizers or checkpoints. A row either names the
test that runs the option, or refuses it with a reason and a way out. What cannot work on CPU for other
reasons (fused kernels, Transformer Engine) is in `backends.cpu.options`.

`python -m megatron_ext.support` prints the table as Markdown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ABILITIES", "ROWS", "Row", "markdown", "refusals"]

ABILITIES = {"cpu": "on CPU", "local-sgd": "with local SGD"}
"""The abilities and backends that the table knows, and how a sentence speaks of them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option (or one value of it) and what is known about it."""

    option: str
    """The flag, with the value that is meant where the row speaks of one."""

    applies_to: tuple[str, ...]
    """Keys of `ABILITIES`."""

    status: Literal["supported", "refused"]
    """Whether a run with the option starts."""

    asked: Callable[[Any], bool]
    """Whether Megatron's arguments, parsed and not yet validated, ask for the option."""

    tested_by: str = ""
    """The test that runs the option: `tests/...py::name`. Empty when refused."""

    reason: str = ""
    """Why it is refused. Empty when supported."""

    way_out: str = ""
    """What to write instead. Empty when supported."""

    def __post_init__(self) -> None:
        """Check that the row says what its status calls for.

        Raises:
            ValueError: a supported row without a test, a refused one without a reason, an unknown ability.
        """
        if (self.status == "supported") != bool(self.tested_by) or (self.status == "refused") != bool(self.reason):
            raise ValueError(f"support table, {self.option}: 'supported' needs a test, 'refused' needs a reason")
        unknown = set(self.applies_to) - set(ABILITIES)
        if unknown or not self.applies_to:
            raise ValueError(f"support table, {self.option}: unknown abilities {sorted(unknown)}")


def refusals(args: Any, ability: str) -> list[str]:
    """Return one sentence for each option in `args` that is refused together with `ability`.

    Args:
        args: Megatron's arguments as parsed, before Megatron validates and changes them.
        ability: a key of `ABILITIES`.

    Raises:
        KeyError: the table does not know `ability`.
    """
    where = ABILITIES[ability]
    return [
        f"{row.option} is not supported {where}: {row.reason}; {row.way_out}"
        for row in ROWS
        if row.status == "refused" and ability in row.applies_to and row.asked(args)
    ]


def markdown() -> str:
    """Return the table for the documentation."""
    lines = [
        "# Megatron options: supported, or refused by name",
        "",
        "Options that touch data parallelism, optimizers or checkpoints. A supported one names the test that",
        "runs it; a refused one ends the run at its start with the sentence below. This file is written by",
        "`python -m megatron_ext.support`.",
    ]
    for ability, where in ABILITIES.items():
        lines += [
            "",
            f"## {where[0].upper()}{where[1:]}",
            "",
            "| option | status | test, or reason and way out |",
        ]
        lines.append("|---|---|---|")
        for row in ROWS:
            if ability in row.applies_to:
                detail = f"`{row.tested_by}`" if row.status == "supported" else f"{row.reason}; {row.way_out}"
                lines.append(f"| `{row.option}` | {row.status} | {detail} |")
    return "\n".join(lines) + "\n"


Verdict = dict[str, str]
Asked = Callable[[Any], bool]


def _tested(by: str) -> Verdict:
    return {"tested_by": by}


def _refused(reason: str, way_out: str = "drop it") -> Verdict:
    return {"reason": reason, "way_out": way_out}


def _option(
    option: str, asked: Asked | None = None, *, cpu: Verdict | None = None, local_sgd: Verdict | None = None
) -> list[Row]:
    """Return one row per verdict.

    Args:
        option: the flag, perhaps with a value.
        asked: whether the arguments ask for it; by default whether the flag's own variable is set.
        cpu: verdict for the CPU backend, None to leave it out of the table.
        local_sgd: verdict for local SGD.
    """
    asked = asked or _is_set(option.split()[0].removeprefix("--").replace("-", "_"))
    verdicts = {"cpu": cpu, "local-sgd": local_sgd}
    return [
        Row(
            option=option,
            applies_to=(ability,),
            status="supported" if "tested_by" in verdict else "refused",
            asked=asked,
            tested_by=verdict.get("tested_by", ""),
            reason=verdict.get("reason", ""),
            way_out=verdict.get("way_out", ""),
        )
        for ability, verdict in verdicts.items()
        if verdict is not None
    ]


def _is_set(name: str) -> Asked:
    return lambda args: bool(getattr(args, name))


def _is(name: str, *values: Any) -> Asked:
    return lambda args: getattr(args, name) in values


_BACKENDS = "tests/backends/"
_LAYOUTS = _tested(f"{_BACKENDS}test_cpu_layouts.py::test_a_dense_layout_computes_what_one_rank_computes")
_RESUME = _tested(f"{_BACKENDS}test_cpu_resume.py::test_a_resumed_run_ends_with_the_same_bits")
_SAME = _tested(f"{_BACKENDS}test_cpu_table.py::test_options_that_change_no_result")
_BF16_SUMS = _tested(f"{_BACKENDS}test_cpu_table.py::test_gradients_reduced_in_bf16_and_summed_in_fp32")
_GROWS = _tested(f"{_BACKENDS}test_cpu_table.py::test_the_batch_grows")
_REPLACE = _tested(f"{_BACKENDS}test_cpu_table.py::test_non_persistent_checkpoints_replace_each_other")
_WORKERS = "tests/local_sgd/"
_APART = _tested(f"{_WORKERS}test_workers_apart.py::test_workers_without_sync_equal_separate_jobs_by_digest")
_CONTINUES = _tested(
    f"{_WORKERS}test_checkpoint.py::test_a_resume_at_any_iteration_follows_the_uninterrupted_run_bit_for_bit"
)
_UNTRIED = _refused("it has not been tested with workers that train apart")
_IGNORED = _refused("Megatron 0.19 reads it and ignores it", "use --step-batch-size-schedule")
_TE = _refused("it needs Transformer Engine")
_RESILIENCY = _refused("it needs NVIDIA's resiliency extension, which has not been tested")
_TORCH_DIST = "use --ckpt-format torch_dist, the default"
_GTP = _refused("Megatron does not combine it with groups inside the data-parallel dimension")
_EMERGING = _is("optimizer", "muon", "dist_muon", "adaptive_muon", "soap", "lion")

_DATA_PARALLEL = (
    _option("--use-distributed-optimizer", cpu=_LAYOUTS, local_sgd=_APART),
    _option("--overlap-grad-reduce", cpu=_LAYOUTS, local_sgd=_APART),
    _option("--overlap-param-gather", cpu=_LAYOUTS, local_sgd=_APART),
    _option("--ddp-bucket-size", cpu=_LAYOUTS, local_sgd=_APART),
    _option("--ddp-average-in-collective", cpu=_SAME, local_sgd=_UNTRIED),
    _option("--grad-reduce-in-bf16", cpu=_BF16_SUMS, local_sgd=_UNTRIED),
    _option("--ddp-reduce-scatter-with-fp32-accumulation", cpu=_BF16_SUMS, local_sgd=_UNTRIED),
    _option("--calculate-per-token-loss", cpu=_SAME, local_sgd=_APART),
    _option(
        "--data-parallel-random-init",
        cpu=_tested(f"{_BACKENDS}test_cpu_table.py::test_random_weights_per_replica_are_made_equal"),
        local_sgd=_UNTRIED,
    ),
    _option(
        "--check-weight-hash-across-dp-replicas-interval",
        cpu=_SAME,
        local_sgd=_refused("between two rounds the workers' weights differ by design"),
    ),
    _option(
        "--moe-router-enable-expert-bias",
        local_sgd=_refused("the bias follows each worker's own token counts, and rounds do not merge it yet"),
    ),
    _option(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda args: "quantile_balancing" in args.moe_router_load_balancing_type,
        local_sgd=_refused("its quantiles are averaged over all data-parallel ranks at every step"),
    ),
    _option("--rampup-batch-size", cpu=_IGNORED, local_sgd=_IGNORED),
    _option("--step-batch-size-schedule", cpu=_GROWS, local_sgd=_UNTRIED),
    _option("--decrease-batch-size-if-needed", local_sgd=_UNTRIED),
    _option(
        "--num-distributed-optimizer-instances above 1",
        lambda args: args.num_distributed_optimizer_instances > 1,
        cpu=_refused("Megatron's hierarchical groups need the einops package and have not been tested on gloo"),
        local_sgd=_refused(
            "the workers take the place of the instances",
            "drop it: the optimizer is sharded inside each worker",
        ),
    ),
    _option(
        "--use-torch-fsdp2",
        cpu=_refused("Megatron builds its device mesh for CUDA", "use --use-distributed-optimizer"),
        local_sgd=_refused(
            "it shards the parameters over all data-parallel ranks, so no worker would have a whole model",
            "use --use-distributed-optimizer",
        ),
    ),
    _option(
        "--use-megatron-fsdp",
        cpu=_refused("its buffers and streams are CUDA's", "use --use-distributed-optimizer"),
        local_sgd=_refused(
            "the outer step cannot write into its sharded parameters", "use --use-distributed-optimizer"
        ),
    ),
    _option(
        "--tensor-parallel-num-weight-shards above the TP size (GTP)",
        lambda args: (args.tensor_parallel_num_weight_shards or 1) > args.tensor_model_parallel_size,
        cpu=_TE,
        local_sgd=_GTP,
    ),
    _option(
        "--expert-tensor-parallel-num-weight-shards above the ETP size (GTP)",
        lambda args: (
            (args.expert_tensor_parallel_num_weight_shards or 1)
            > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        ),
        cpu=_TE,
        local_sgd=_GTP,
    ),
    _option(
        "--hybrid-context-parallel",
        cpu=_TE,
        local_sgd=_refused("it makes groups of context-parallel ranks that would cross workers"),
    ),
    _option(
        "--use-tp-pp-dp-mapping",
        cpu=_tested(f"{_BACKENDS}test_cpu_layouts.py::test_the_order_of_ranks_does_not_matter"),
        local_sgd=_UNTRIED,
    ),
    _option(
        "--use-nccl-ub",
        _is_set("nccl_ub"),
        cpu=_refused("it registers buffers with NCCL"),
        local_sgd=_UNTRIED,
    ),
)

_OPTIMIZERS = (
    _option(
        "--optimizer sgd",
        _is("optimizer", "sgd"),
        cpu=_tested(f"{_BACKENDS}test_cpu_table.py::test_sgd_learns"),
        local_sgd=_tested(
            f"{_WORKERS}test_rounds.py::test_sgd_with_interval_one_and_no_momentum_is_synchronous_training"
        ),
    ),
    _option(
        "--optimizer muon, dist_muon, adaptive_muon, soap or lion (layer-wise optimizers)",
        _EMERGING,
        cpu=_refused("the package with these optimizers has not been tested on CPU", "use adam or sgd"),
        local_sgd=_refused(
            "the outer step knows the parameter shards of Megatron's Adam and SGD alone", "use adam or sgd"
        ),
    ),
    _option(
        "--use-precision-aware-optimizer",
        cpu=_TE,
        local_sgd=_refused("the fp32 values that the outer step works on are inside the fused optimizer"),
    ),
    _option(
        "--optimizer-cpu-offload",
        cpu=_refused("the optimizer is in the CPU's memory already"),
        local_sgd=_refused("the outer step cannot follow the optimizer's copies to the host yet"),
    ),
    _option(
        "--optimizer-cuda-graph",
        cpu=_refused("there are no CUDA graphs"),
        local_sgd=_refused("a captured step would not see what the outer step writes"),
    ),
    _option(
        "--cuda-graph-impl full_iteration",
        _is("cuda_graph_impl", "full_iteration"),
        local_sgd=_refused("a captured iteration cannot have an outer step in some iterations alone"),
    ),
    _option(
        "--overlap-param-gather-with-optimizer-step",
        cpu=_refused("Megatron does not combine it with torch_dist checkpoints"),
        local_sgd=_refused("parameters would be gathered before the outer step has changed them"),
    ),
    _option(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        cpu=_TE,
        local_sgd=_refused("the outer step refreshes parameters while that buffer holds gradients"),
    ),
    _option("--fp8-param-gather", cpu=_TE, local_sgd=_UNTRIED),
    _option("--fp4-param-gather", cpu=_TE, local_sgd=_UNTRIED),
    _option(
        "--qk-clip",
        cpu=_TE,
        local_sgd=_refused("it reduces attention logits over all data-parallel ranks at every step"),
    ),
    _option(
        "--mtp-num-layers",
        cpu=_tested(f"{_BACKENDS}test_cpu_table.py::test_multi_token_prediction"),
        local_sgd=_UNTRIED,
    ),
    _option(
        "--iterations-to-skip",
        cpu=_tested(f"{_BACKENDS}test_cpu_table.py::test_skipped_iterations_train_nothing"),
        local_sgd=_UNTRIED,
    ),
    _option(
        "--perform-rl-step",
        cpu=_refused("Megatron's inference engine, which makes the samples, runs on GPUs"),
        local_sgd=_UNTRIED,
    ),
)

_CHECKPOINTS = (
    _option("--ckpt-format torch_dist", _is("ckpt_format", "torch_dist"), cpu=_RESUME, local_sgd=_CONTINUES),
    _option(
        "--ckpt-format torch",
        _is("ckpt_format", "torch"),
        cpu=_RESUME,
        local_sgd=_refused("the state of the workers has no place in it", _TORCH_DIST),
    ),
    *(
        _option(
            f"--ckpt-format {name}",
            _is("ckpt_format", name),
            cpu=_refused(reason, _TORCH_DIST),
            local_sgd=_refused(reason, _TORCH_DIST),
        )
        for name, reason in (
            ("torch_dcp", "it is for --use-torch-fsdp2"),
            ("fsdp_dtensor", "it is for --use-megatron-fsdp"),
            ("zarr", "Megatron 0.19 does not have it any more"),
        )
    ),
    _option(
        "--ckpt-convert-format",
        local_sgd=_refused("the state of the workers would be lost", "convert in a run without --use-local-sgd"),
    ),
    _option(
        "--dist-ckpt-optim-fully-reshardable",
        cpu=_RESUME,
        local_sgd=_tested(f"{_WORKERS}test_checkpoint.py::test_another_layout_loads_what_was_saved_reshardable"),
    ),
    _option("--ckpt-fully-parallel-load", cpu=_RESUME, local_sgd=_UNTRIED),
    _option("--ckpt-assume-constant-structure", cpu=_RESUME, local_sgd=_UNTRIED),
    _option("--load-main-params-from-ckpt", local_sgd=_UNTRIED),
    _option(
        "--async-save",
        cpu=_refused("Megatron's writer, a process of its own, picks a CUDA device"),
        local_sgd=_UNTRIED,
    ),
    _option(
        "--non-persistent-ckpt-type global",
        _is("non_persistent_ckpt_type", "global"),
        cpu=_REPLACE,
        local_sgd=_UNTRIED,
    ),
    _option(
        "--non-persistent-ckpt-type local or in_memory",
        _is("non_persistent_ckpt_type", "local", "in_memory"),
        cpu=_RESILIENCY,
        local_sgd=_RESILIENCY,
    ),
)

_RUN_CONTROL = (
    _option(
        "--exit-signal-handler",
        cpu=_SAME,
        local_sgd=_tested(
            f"{_WORKERS}test_exit.py::test_a_signal_ends_all_workers_at_the_next_round_with_a_checkpoint"
        ),
    ),
    _option(
        "--exit-duration-in-mins",
        cpu=_SAME,
        local_sgd=_tested(f"{_WORKERS}test_exit.py::test_a_time_limit_ends_all_workers_at_the_next_round"),
    ),
    _option("--inprocess-restart", cpu=_RESILIENCY, local_sgd=_RESILIENCY),
    _option("--enable-ft-package", cpu=_RESILIENCY, local_sgd=_RESILIENCY),
    _option("--adlr-autoresume", local_sgd=_UNTRIED),
    _option(
        "--log-straggler",
        cpu=_SAME,
        local_sgd=_refused("its report gathers from all ranks, which makes the workers wait for each other"),
    ),
)

ROWS: tuple[Row, ...] = tuple(
    row for part in (_DATA_PARALLEL, _OPTIMIZERS, _CHECKPOINTS, _RUN_CONTROL) for rows in part for row in rows
)
"""The table."""


if __name__ == "__main__":
    print(markdown(), end="")
