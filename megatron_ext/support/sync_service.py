# SPDX-License-Identifier: Apache-2.0
"""Rows on the sync service: what of an ordinary job its rounds cannot follow."""

from __future__ import annotations

from megatron_ext.support.row import asks_for, differs, option, refused, says, tested
from megatron_ext.support.verdicts import RESILIENCY

__all__ = ["SYNC_SERVICE"]

_NO_VALUES = refused("the fp32 values that a round moves are not where Megatron's Adam and SGD keep them")
_NO_FSDP = refused("a round cannot write into its sharded parameters", "use --use-distributed-optimizer")
_UNTRIED = refused("it has not been tested there")

SYNC_SERVICE = (
    option(
        "--optimizer muon, dist_muon, adaptive_muon, soap or lion (layer-wise optimizers)",
        says("optimizer", "muon", "dist_muon", "adaptive_muon", "soap", "lion"),
        sync_service=refused("a round knows the parameter shards of Megatron's Adam and SGD alone", "use adam or sgd"),
    ),
    option("--use-precision-aware-optimizer", sync_service=_NO_VALUES),
    option("--optimizer-cpu-offload", sync_service=_NO_VALUES),
    option(
        "--cuda-graph-impl full_iteration",
        says("cuda_graph_impl", "full_iteration"),
        sync_service=refused("a captured iteration would not see what a round writes"),
    ),
    option("--optimizer-cuda-graph", sync_service=refused("a captured step would not see what a round writes")),
    option(
        "--overlap-param-gather-with-optimizer-step",
        sync_service=refused("parameters would be gathered before a round has changed them"),
    ),
    option(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        sync_service=refused("a round refreshes parameters while that buffer holds gradients"),
    ),
    option("--fp8-param-gather", sync_service=_UNTRIED),
    option("--fp4-param-gather", sync_service=_UNTRIED),
    option("--mtp-num-layers", sync_service=_UNTRIED),
    option(
        "--iterations-to-skip",
        sync_service=refused("a skipped iteration is no step, so that the peer would lack rounds that others wait for"),
    ),
    option(
        "--result-rejected-tracker-filename",
        asks_for("result_rejected_tracker_filename"),
        sync_service=refused("Megatron adds what is in that file to --iterations-to-skip, which is refused"),
    ),
    option("--freeze-all-layers", sync_service=refused("there would be nothing to train")),
    option(
        "--moe-router-enable-expert-bias",
        sync_service=tested("tests/sync_service/megatron/test_expert_bias.py::test_a_round_takes_the_mean_of_the_peers_biases"),
    ),
    option(
        "--num-distributed-optimizer-instances above 1",
        lambda args: args.num_distributed_optimizer_instances > 1,
        sync_service=_UNTRIED,
    ),
    option("--use-torch-fsdp2", sync_service=_NO_FSDP),
    option("--use-megatron-fsdp", sync_service=_NO_FSDP),
    option(
        "--ckpt-format other than torch_dist",
        differs("ckpt_format", "torch_dist"),
        sync_service=refused("where a peer is in the run has no place in it", "use --ckpt-format torch_dist"),
    ),
    option(
        "--dataloader-type external",
        says("dataloader_type", "external"),
        sync_service=refused("samples that Megatron does not choose cannot be cut into the peers' parts"),
    ),
    option(
        "--phase-transition-iterations",
        asks_for("phase_transition_iterations"),
        sync_service=refused("the peers' parts would have to be cut anew in every phase"),
        hot_switch=refused("sequences are counted from the first phase on, so that a new corpus would not begin at 0"),
    ),
    option("--decrease-batch-size-if-needed", sync_service=_UNTRIED),
    option("--perform-rl-step", sync_service=_UNTRIED),
    option("--inprocess-restart", sync_service=RESILIENCY),
    option("--enable-ft-package", sync_service=RESILIENCY),
    option("--async-save", sync_service=_UNTRIED),
    option(
        "--non-persistent-ckpt-type local or in_memory",
        says("non_persistent_ckpt_type", "local", "in_memory"),
        sync_service=RESILIENCY,
    ),
)
