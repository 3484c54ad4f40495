# SPDX-License-Identifier: Apache-2.0
"""Rows on optimizers."""

from __future__ import annotations

from megatron_ext.support.row import asks_for, option, refused, says, tested
from megatron_ext.support.verdicts import BACKENDS, NEEDS_TE, STRATEGIES, UNTRIED, UNTRIED_HOT, UNTRIED_ON_CPU, WORKERS

__all__ = ["OPTIMIZERS"]

_EMERGING = says("optimizer", "muon", "dist_muon", "adaptive_muon", "soap", "lion")

OPTIMIZERS = (
    option(
        "--optimizer sgd",
        says("optimizer", "sgd"),
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_sgd_learns"),
        local_sgd=tested(
            f"{WORKERS}test_rounds.py::test_sgd_with_interval_one_and_no_momentum_is_synchronous_training"
        ),
        hot_switch=tested(f"{STRATEGIES}test_training.py::test_strategies_without_data_in_a_step_change_nothing"),
    ),
    option(
        "--optimizer muon, dist_muon, adaptive_muon, soap or lion (layer-wise optimizers)",
        _EMERGING,
        cpu=refused("the package with these optimizers has not been tested on CPU", "use adam or sgd"),
        local_sgd=refused(
            "the outer step knows the parameter shards of Megatron's Adam and SGD alone", "use adam or sgd"
        ),
        hot_switch=refused("it has not been tested with several strategies", "use adam or sgd"),
    ),
    option(
        "--use-precision-aware-optimizer",
        cpu=NEEDS_TE,
        local_sgd=refused("the fp32 values that the outer step works on are inside the fused optimizer"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--optimizer-cpu-offload",
        cpu=refused("the optimizer is in the CPU's memory already"),
        local_sgd=refused("the outer step cannot follow the optimizer's copies to the host yet"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--optimizer-cuda-graph",
        cpu=refused("there are no CUDA graphs"),
        local_sgd=refused("a captured step would not see what the outer step writes"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--cuda-graph-impl full_iteration",
        says("cuda_graph_impl", "full_iteration"),
        local_sgd=refused("a captured iteration cannot have an outer step in some iterations alone"),
        hot_switch=refused("a captured iteration cannot switch strategies"),
    ),
    option(
        "--overlap-param-gather-with-optimizer-step",
        cpu=refused("Megatron does not combine it with torch_dist checkpoints"),
        local_sgd=refused("parameters would be gathered before the outer step has changed them"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        cpu=NEEDS_TE,
        local_sgd=refused("the outer step refreshes parameters while that buffer holds gradients"),
        hot_switch=UNTRIED_HOT,
    ),
    option("--fp8-param-gather", cpu=NEEDS_TE, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option("--fp4-param-gather", cpu=NEEDS_TE, local_sgd=UNTRIED, hot_switch=UNTRIED_HOT),
    option(
        "--qk-clip",
        cpu=NEEDS_TE,
        local_sgd=refused("it reduces attention logits over all data-parallel ranks at every step"),
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--mtp-num-layers",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_multi_token_prediction"),
        local_sgd=UNTRIED,
        hot_switch=refused("the parameter view does not know its layers"),
    ),
    option(
        "--freeze-all-layers",
        cpu=UNTRIED_ON_CPU,
        local_sgd=refused("there would be nothing to train"),
        hot_switch=refused("there would be nothing to train"),
    ),
    option(
        "--iterations-to-skip",
        cpu=tested(f"{BACKENDS}test_cpu_table.py::test_skipped_iterations_train_nothing"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
    option(
        "--result-rejected-tracker-filename",
        asks_for("result_rejected_tracker_filename"),
        local_sgd=refused("Megatron adds what is in that file to --iterations-to-skip, which is refused"),
        hot_switch=refused("Megatron adds what is in that file to --iterations-to-skip, which is refused"),
    ),
    option(
        "--perform-rl-step",
        cpu=refused("Megatron's inference engine, which makes the samples, runs on GPUs"),
        local_sgd=UNTRIED,
        hot_switch=UNTRIED_HOT,
    ),
)
