# SPDX-License-Identifier: Apache-2.0
"""The short set of tests by which a release of Megatron is tried, by feature."""

from collections.abc import Mapping

__all__ = ["FEATURES", "NAMES"]

_RESUME = "tests/local_sgd/test_checkpoint.py::test_a_resume_at_any_iteration_follows_the_uninterrupted_run_bit_for_bit"
_HYBRID = "tests/local_sgd/test_hybrid_models.py"
_HYBRID_PEERS = "tests/sync_service/megatron/test_hybrid_peers.py"

FEATURES: Mapping[str, tuple[str, ...]] = {
    "CPU backend": ("tests/backends/test_cpu_layouts.py::test_a_dense_layout_computes_what_one_rank_computes",),
    "local SGD": (
        "tests/local_sgd/test_rounds.py::test_sgd_with_interval_one_and_no_momentum_is_synchronous_training",
        "tests/local_sgd/test_rounds.py::test_overlapped_communication_changes_no_bit",
        f"{_RESUME}[penalty]",
        f"{_RESUME}[inner SGD]",
        "tests/local_sgd/meetings/test_meeting_runs.py::test_a_resume_where_workers_differ_repeats_the_run_bit_for_bit",
        "tests/local_sgd/test_async_save.py::test_no_step_waits_for_other_workers_while_a_checkpoint_is_written",
    ),
    "sync service": ("tests/sync_service/megatron/test_jobs.py::test_peers_do_what_workers_inside_one_job_do",),
    "SPES": (
        "tests/spes/test_feature.py::test_peers_of_different_layouts_have_the_same_model_after_a_round",
        "tests/spes/test_feature.py::test_peers_that_train_all_experts_do_what_workers_inside_one_job_do",
        "tests/spes/test_feature.py::test_frozen_experts_pass_on_the_gradients_of_their_inputs",
    ),
    "hybrid models": (
        f"{_HYBRID}::test_workers_are_equal_after_a_round_and_a_run_resumes_bit_for_bit",
        f"{_HYBRID}::test_a_round_of_the_mean_after_one_step_is_the_step_of_the_mean_gradient",
        f"{_HYBRID_PEERS}::test_peers_of_all_layouts_in_one_run_equal_peers_of_one_rank_up_to_rounding",
        "tests/spes/test_hybrid_models.py::test_a_peer_trains_its_own_experts_and_all_other_layers",
    ),
    "hot switching": (
        "tests/hot_switch/test_training.py::test_the_gradient_is_the_same_however_sequences_are_shared_out",
        "tests/hot_switch/test_training.py::test_biases_of_routers_follow_the_tokens_of_all_strategies",
    ),
}
"""Node ids of tests, each of which trains in Megatron's own loop."""

NAMES: Mapping[str, str] = {
    "local SGD": "local-sgd",
    "sync service": "sync-service",
    "SPES": "spes",
    "hot switching": "hot-switch",
}
"""What features are called in the package."""
