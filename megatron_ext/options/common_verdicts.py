# SPDX-License-Identifier: Apache-2.0
"""Verdicts that several rows share."""

from __future__ import annotations

from megatron_ext.options.verdict import accepted, like, needs_gpu, refused, tested

__all__ = [
    "APART",
    "ASYNC_SAVE",
    "AS_ANY_JOB",
    "AS_A_PEER",
    "BACKENDS",
    "BARE",
    "BOOKKEEPING",
    "BUNDLE",
    "CONTINUES",
    "CONVERTED",
    "CURRENT_LAYERS",
    "EXPERTS",
    "EXPERTS_ASYNC_SAVE",
    "HOT_ASYNC_SAVE",
    "HOT_BOOKKEEPING",
    "HOT_BUNDLE",
    "HOT_CONVERTED",
    "HOT_OTHER_WAYS",
    "HOT_RESUME",
    "HOT_SAME",
    "HOT_SKIPPED",
    "HOT_STATIC",
    "IGNORED",
    "NEEDS_TE",
    "NO_PEER_FSDP",
    "NO_TE_ON_CPU",
    "ON_A_GPU",
    "ON_GPU_ALONE",
    "ON_GPU_ALONE_HOT",
    "ON_GPU_ALONE_PEERS",
    "OTHER_WAYS",
    "OWN_SCRIPT",
    "PAIRWISE",
    "PEERS",
    "PEERS_ASYNC_SAVE",
    "PEERS_BUNDLE",
    "PEERS_CURRENT_LAYERS",
    "PEER_ON_A_GPU",
    "RESILIENCY",
    "RESUME",
    "ROUNDS",
    "SAME",
    "STRATEGIES",
    "UNKNOWN_TENSORS",
    "WORKERS",
    "WORKERS_BOOKKEEPING",
    "WORKERS_ON_TE",
    "WORKERS_OTHER_WAYS",
]

BACKENDS = "tests/backends/"
STRATEGIES = "tests/hot_switch/"
PAIRWISE = "--local-sgd-pseudo-grad-reducer pairwise"
"""After whose rounds workers have nothing in common."""

WORKERS = "tests/local_sgd/"
PEERS = "tests/sync_service/megatron/"
EXPERTS = "tests/spes/"

OWN_SCRIPT = accepted("it needs a script of one's own, and no test has such a script")
ON_A_GPU = accepted("only a GPU can run it, where no test has")

BARE = tested(f"{BACKENDS}test_cpu_options.py::test_a_command_without_any_word_about_the_backend_runs")
SAME = tested(f"{BACKENDS}test_cpu_table.py::test_options_that_change_no_result")
RESUME = tested(f"{BACKENDS}test_cpu_resume.py::test_a_resumed_run_ends_with_the_same_bits")
BOOKKEEPING = tested(f"{BACKENDS}test_cpu_resume.py::test_options_for_keeping_and_reading_checkpoints")
ASYNC_SAVE = tested(
    f"{BACKENDS}test_cpu_async_save.py::test_a_resume_from_an_asynchronous_save_ends_with_the_same_bits"
)
OTHER_WAYS = tested(
    f"{BACKENDS}test_cpu_resume.py::test_options_for_writing_and_taking_checkpoints_in_other_ways"
)
CONVERTED = tested(f"{BACKENDS}test_cpu_resume.py::test_a_resume_from_a_converted_checkpoint_keeps_the_bits")
APART = tested(f"{WORKERS}test_workers_apart.py::test_workers_without_sync_equal_separate_jobs_by_digest")
CONTINUES = tested(
    f"{WORKERS}test_checkpoint.py::test_a_resume_at_any_iteration_follows_the_uninterrupted_run_bit_for_bit"
)
WORKERS_BOOKKEEPING = tested(f"{WORKERS}test_checkpoint.py::test_options_for_keeping_and_reading_checkpoints")
WORKERS_OTHER_WAYS = tested(
    f"{WORKERS}test_checkpoint.py::test_options_for_writing_and_taking_checkpoints_in_other_ways"
)
WORKERS_ON_TE = tested(
    f"{WORKERS}test_transformer_engine.py::test_a_run_resumes_with_the_same_bits_in_the_middle_of_an_interval"
)
ROUNDS = tested(f"{WORKERS}test_option_bundles.py::test_rounds_and_a_resume_with_the_option")
BUNDLE = tested(
    f"{WORKERS}test_option_bundles.py"
    "::test_a_worker_is_a_stock_job_until_a_round_and_a_resume_keeps_the_bits"
)

HOT_STATIC = tested(f"{STRATEGIES}test_training.py::test_hot_equals_static")
HOT_SAME = tested(f"{STRATEGIES}test_training.py::test_options_that_change_no_result")
HOT_RESUME = tested(f"{STRATEGIES}test_checkpoints.py::test_a_resumed_run_ends_with_the_same_bits")
HOT_BOOKKEEPING = tested(f"{STRATEGIES}test_checkpoints.py::test_options_for_keeping_and_reading_checkpoints")
HOT_OTHER_WAYS = tested(
    f"{STRATEGIES}test_checkpoints.py::test_options_for_writing_and_taking_checkpoints_in_other_ways"
)
HOT_BUNDLE = tested(f"{STRATEGIES}test_option_bundles.py::test_hot_equals_static_and_a_resume_keeps_the_bits")
HOT_CONVERTED = tested(f"{STRATEGIES}test_checkpoints.py::test_a_resume_from_a_converted_checkpoint_keeps_the_bits")
HOT_SKIPPED = tested(f"{STRATEGIES}test_checkpoints.py::test_skipped_iterations_read_their_sequences")
HOT_ASYNC_SAVE = tested(f"{STRATEGIES}test_async_save.py::test_a_resumed_run_ends_with_the_same_bits")

PEERS_ASYNC_SAVE = tested(f"{PEERS}test_async_save.py::test_a_peer_resumes_with_the_same_bits")
EXPERTS_ASYNC_SAVE = tested(f"{EXPERTS}test_async_save.py::test_a_peer_resumes_with_the_same_bits")
PEERS_BUNDLE = tested(
    f"{PEERS}test_option_bundles.py"
    "::test_peers_end_equal_and_one_alone_is_a_stock_job_also_when_it_is_killed_and_resumes"
)
AS_ANY_JOB = accepted("between two rounds a peer is an ordinary job")
PEER_ON_A_GPU = accepted("only a GPU can run it, and between two rounds a peer is an ordinary job")
AS_A_PEER = like("sync-service")
NO_PEER_FSDP = refused("a round cannot write into its sharded parameters", "use --use-distributed-optimizer")

ON_GPU_ALONE = refused("only a GPU can show it, where it has not run with workers that train apart")
ON_GPU_ALONE_HOT = refused("only a GPU can show it, where it has not run with several strategies")
ON_GPU_ALONE_PEERS = refused("only a GPU can show it, where it has not run with peers")
UNKNOWN_TENSORS = refused("the parameter view, by which weights are exchanged, does not know its tensors")
CURRENT_LAYERS = tested(
    f"{WORKERS}test_current_layers.py::test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit"
)
PEERS_CURRENT_LAYERS = tested(
    f"{PEERS}test_current_layers.py::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding"
)
IGNORED = tested(f"{BACKENDS}test_cpu_table.py::test_options_that_megatron_ignores_change_no_bit")
NEEDS_TE = refused("it needs Transformer Engine")
NO_TE_ON_CPU = needs_gpu("it needs Transformer Engine, which needs a GPU")
RESILIENCY = refused("it needs nvidia-resiliency-ext 0.6 or later, with which it has not run")
