# SPDX-License-Identifier: Apache-2.0
"""What runs each command of the documentation: a test, or, listed by name, people with GPUs, a cluster or hours.

Keys are the beginning of a command's line; the longest one that fits counts. Whatever runs it, the words of every
command are checked by tests/packaging/test_documented_commands.py.
"""

RUN_BY = {
    "megatron-ext patches": "tests/cli/test_patches.py::test_check_passes_on_the_installed_megatron",
    "megatron-ext patches --fork": "tests/fork/test_seam_fit.py::test_the_command_reads_a_fork_of_an_old_release",
    "megatron-ext doctor": "tests/cli/test_doctor.py::test_it_says_what_works_and_what_does_not_with_reasons",
    "megatron-ext data prepare": "tests/data/test_cli.py::test_the_summary_ends_with_the_flags_for_megatron",
    "megatron-ext data check": "tests/data/checks/test_vocabulary.py::test_the_record_of_a_corpus_says_its_vocabulary",
    "megatron-ext data pad": (
        "tests/examples/test_hot_switch_baseline.py::test_padded_rows_are_made_once_and_their_ends_count_nothing"
    ),
    "megatron-ext data list": "tests/data/test_manifest.py::test_megatron_trains_on_what_is_listed_as_on_one_corpus",
    "megatron-ext convert": "tests/cli/test_convert.py::test_a_model_goes_there_and_back_and_takes_its_tokenizer_along",
    "megatron-ext convert upcycle": "tests/cli/test_convert.py::test_a_dense_checkpoint_becomes_a_mixture",
    "megatron-ext evaluate": (
        "tests/cli/test_evaluate.py::test_perplexity_is_printed_written_and_drawn_beside_a_baseline"
    ),
    "megatron-ext local-sgd report": (
        "tests/cli/test_local_sgd.py::test_the_table_shows_every_round_once_and_the_picture_is_drawn"
    ),
    "megatron-ext local-sgd suggest": (
        "tests/cli/test_local_sgd_suggest.py::test_the_plainest_setting_that_is_good_enough_is_proposed"
    ),
    "megatron-ext simulate local-sgd": "tests/cli/test_simulate.py::test_a_run_is_shown_beside_synchronous_training",
    "megatron-ext simulate hot-switch": (
        "tests/cli/test_simulate_hot_switch.py::"
        "test_a_list_is_shown_beside_three_single_strategies_in_the_same_memory"
    ),
    "megatron-ext simulate sync-service": "tests/cli/test_simulate.py::test_a_run_at_a_sync_service_is_shown",
    "megatron-ext hot-switch plan": (
        "tests/cli/test_hot_switch.py::test_the_table_has_a_row_per_switch_in_the_order_of_a_step"
    ),
    "megatron-ext hot-switch profile": (
        "tests/cli/test_hot_switch_profile.py::test_measured_times_are_written_for_suggest"
    ),
    "megatron-ext hot-switch suggest": (
        "tests/cli/test_hot_switch_suggest.py::test_the_report_ends_with_flags_that_plan_accepts"
    ),
    "megatron-ext server start": "tests/sync_service/server/test_draining.py",
    "megatron-ext server status": "tests/sync_service/server/test_admission.py",
    "megatron-ext server drain": "tests/sync_service/server/test_draining.py",
    "megatron-ext server evict": "tests/sync_service/server/test_admission.py",
    "megatron-ext server recover": (
        "tests/sync_service/server/recovery/test_rebuilding.py::"
        "test_recovering_says_what_it_finds_keeps_the_old_journal_and_does_nothing_twice"
    ),
    "megatron-ext server compact": (
        "tests/sync_service/server/test_compaction.py::"
        "test_peers_resume_after_a_compaction_with_the_bits_that_they_would_have_had"
    ),
    "megatron-ext explain": "tests/explain/test_command.py",
    "megatron-ext spes translate-config": "tests/spes/test_official_config.py",
    "torchrun": "tests/test_activation.py::test_the_module_form_runs_an_unchanged_script",
    "torchrun --nproc-per-node 2 examples/pretrain_gpt.py": (
        "tests/sync_service/megatron/test_jobs.py::test_peers_of_different_layouts_end_with_the_same_bits"
    ),
    "torchrun --nproc-per-node 4 --master-port 29501 examples/pretrain_gpt.py": (
        "tests/sync_service/megatron/test_jobs.py::test_peers_of_different_layouts_end_with_the_same_bits"
    ),
    "torchrun --nproc-per-node 16": (
        "tests/spes/test_switching_peers.py::test_workers_peers_and_strategies_in_one_run"
    ),
    "--use-local-sgd": "tests/local_sgd/test_rounds.py",
    "--use-local-sgd --local-sgd-sync-interval 64": "tests/local_sgd/test_muon.py",
    "--use-local-sgd --local-sgd-workers 4 --local-sgd-use-async": "tests/local_sgd/meetings",
    "--hot-switch-strategies": "tests/hot_switch/test_training.py::test_hot_equals_static",
    "--spes-config": "tests/spes/test_feature.py",
    "examples/quickstart.sh": "tests/examples/test_quickstart.py::test_the_quickstart_writes_its_results",
    "examples/hot_switch/quickstart.sh": "tests/examples/test_hot_switch_quickstart.py",
    "examples/hot_switch/create_web_dataset.sh": (
        "tests/examples/test_hot_switch_scripts.py::test_web_pages_become_a_corpus_once"
    ),
    "examples/hot_switch/exprs_for_A100_40G.sh": (
        "tests/examples/test_hot_switch_scripts.py::test_the_small_evaluation_compares_hot_and_static"
    ),
    "examples/hot_switch/baseline/exprs_for_A100_40G.sh": "tests/examples/test_hot_switch_baseline.py",
    "examples/hot_switch/exprs_for_paper/commoncrawl/commoncrawl_7b_8gpus.sh": (
        "tests/examples/test_hot_switch_scripts.py::"
        "test_the_ten_cases_start_what_the_tables_say_and_megatron_accepts_it"
    ),
    "examples/spes/quickstart.sh": "tests/examples/test_spes_quickstart.py",
    "examples/spes/tokenize_data.py": "tests/data/shards/test_tokenize_texts.py",
    "python examples/spes/tokenize_data.py": (
        "tests/data/shards/test_tokenize_texts.py::"
        "test_the_seeds_command_line_makes_its_files_and_prepare_reads_them_back"
    ),
    "examples/spes/convet_model_to_hf_unshard.sh": (
        "tests/examples/test_spes_evaluation.py::test_a_run_becomes_a_model_under_both_spellings"
    ),
    "examples/spes/eval_full.sh": (
        "tests/evaluation/test_lm_tasks.py::test_a_script_evaluates_a_model_on_local_questions"
    ),
    "examples/spes/run_single_node.sh": (
        "tests/examples/test_spes_scripts.py::test_a_cluster_is_started_over_ssh_and_a_peer_that_fails_ends_no_other"
    ),
    "examples/spes/run_parameter_server.sh": (
        "tests/examples/test_spes_scripts.py::test_the_server_starts_with_the_scripts_variables"
    ),
    "examples/spes/dense_to_evaluation.sh": (
        "tests/examples/test_dense_to_evaluation.py::"
        "test_a_dense_model_is_upcycled_trained_by_four_peers_exported_and_evaluated"
    ),
    "examples/local_sgd/train_gpt3_diloco_single_node.sh": (
        "tests/examples/test_launch_scripts.py::test_a_single_node_trains_on_cpu_on_given_text"
    ),
    "patches/apply.sh": (
        "tests/fork/test_apply_set.py::"
        "test_a_dry_run_by_default_then_in_and_out_again_with_every_byte_as_before"
    ),
    "tests/run.sh": "tests/packaging/test_run_script.py",
    "tests/run.sh --all": "tests/packaging/test_run_script.py::test_all_runs_the_slow_tests_too",
    "python -m tests.chaos --jobs": "tests/chaos/test_jobs.py",
    "python -m tests.chaos": "tests/chaos/test_synthetic.py::test_the_command_prints_a_table_and_writes_its_figures",
    "python -m tests.versions": "tests/versions/test_record.py",
    "pip install --no-build-isolation examples/extension": (
        "tests/examples/test_extension.py::test_an_installed_feature_is_in_the_next_run"
    ),
    "python -m pip": "tests/packaging/test_wheel.py::test_the_metadata_is_what_the_documentation_says",
    "pip": "tests/packaging/test_wheel.py::test_the_metadata_is_what_the_documentation_says",
    "python -m benchmarks.all": "tests/benchmarks/test_all.py",
    "python -m benchmarks.convergence": "tests/benchmarks/test_convergence.py",
    "python -m benchmarks.diloco_bandwidth": "tests/benchmarks/test_diloco_bandwidth.py",
    "python -m benchmarks.hot_switch_convergence": "tests/benchmarks/test_hot_switch_convergence.py",
    "python -m benchmarks.hot_switch_estimate": "tests/benchmarks/test_hot_switch_estimate.py",
    "python -m benchmarks.messages": "tests/benchmarks/test_messages.py",
    "python -m benchmarks.outer_methods": "tests/benchmarks/test_outer_methods.py",
    "python -m benchmarks.muloco_convergence": "tests/benchmarks/test_muloco_convergence.py",
    "python -m benchmarks.server_load": "tests/benchmarks/test_server_load.py",
    "python -m benchmarks.outer_sync": "tests/benchmarks/test_outer_sync.py",
    "python -m benchmarks.overlapped_step": "tests/benchmarks/test_overlapped_step.py",
    "python -m benchmarks.simulated": "tests/benchmarks/test_simulated.py",
    "python -m benchmarks.spes_convergence": "tests/benchmarks/test_spes_convergence.py",
    "python -m benchmarks.spes_method": "tests/benchmarks/test_spes_method.py",
    "python -m benchmarks.spes_round": "tests/benchmarks/test_spes_round.py",
    "python -m benchmarks.step_overhead": "tests/benchmarks/test_step_overhead.py",
    "python -m benchmarks.straggler": "tests/benchmarks/test_straggler.py",
    "python -m benchmarks.token_weights": "tests/benchmarks/test_token_weights.py",
    "python -m benchmarks.switch": "tests/benchmarks/test_switch.py",
    "python -m benchmarks.switch_plan": "tests/benchmarks/test_switch_plan.py",
    "python -m benchmarks.switch_sizes": (
        "tests/benchmarks/test_switch.py::test_the_size_from_which_parts_travel_alone_is_measured"
    ),
    "python -m benchmarks.vs_atorch": "tests/benchmarks/test_vs_atorch.py",
    "scripts/audit_dependencies.sh": (
        "tests/packaging/test_audit.py::test_the_audit_ends_with_0_only_if_all_were_looked_up"
    ),
    "sphinx-build": "tests/packaging/test_site.py::test_every_page_is_in_the_site",
}
"""A test, or a file or folder of tests, that runs the command, at toy size where it trains."""

NOT_RUN = {
    "docker": "a Docker daemon and NVIDIA's image: tests/examples/test_container.py reads the Dockerfile",
    "kubectl": "a cluster: tests/examples/test_kubernetes.py reads the manifests",
    "sbatch": "a SLURM cluster: tests/examples/test_launch_scripts.py runs the script as a job of two nodes on CPU",
    "examples/sync_service/two_sites.sh": "root and network namespaces; docs/two-sites.md has what it printed",
    "examples/local_sgd/train_gpt3_diloco_multi_node.sh": (
        "8 GPUs a node; tests/examples/test_launch_scripts.py has Megatron accept what it starts, and trains on CPU"
    ),
    "examples/hot_switch/llama_hot_switch.sh": (
        "8 GPUs a host; tests/examples/test_hot_switch_scripts.py has Megatron accept what it starts"
    ),
    "examples/hot_switch/llama_static_parallel.sh": "likewise",
    "examples/hot_switch/baseline/llama_baseline.sh": "likewise, in tests/examples/test_hot_switch_baseline.py",
    "examples/spes/run_cluster.sh": (
        "8 GPUs a node; tests/examples/test_spes_scripts.py runs it with two nodes on CPU, and has Megatron accept it"
    ),
    "examples/spes/run_single_node.sh 0": (
        "8 GPUs; tests/examples/test_spes_scripts.py has Megatron accept what it starts, and trains with BACKEND=cpu"
    ),
    "python -m pytest": "GPUs: the tests that it names",
    "pytest --megatron": "a Megatron-LM checkout",
    "python -m zipfile": "wheels of Megatron: tests/fork/test_patch_set.py holds the sets against the installed one",
    "git": "a fork of the user's",
    "python -m benchmarks.straggler_in_megatron": "minutes: tests/benchmarks has the parts",
}
"""Needs GPUs, a cluster, or what only the user has; by name, with what is tested of it instead."""
