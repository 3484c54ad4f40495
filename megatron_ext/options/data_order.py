# SPDX-License-Identifier: Apache-2.0
"""Rows on the samples, and the order in which they are read."""

from __future__ import annotations

from megatron_ext.options.asked import asks_to_switch, packs_documents
from megatron_ext.options.common_verdicts import (
    APART,
    BACKENDS,
    BARE,
    BUNDLE,
    HOT_STATIC,
    OWN_SCRIPT,
    PEER_ON_A_GPU,
    PEERS,
    PEERS_BUNDLE,
    ROUNDS,
    STRATEGIES,
    WORKERS,
)
from megatron_ext.options.row import differs, everywhere, is_set, row, says
from megatron_ext.options.verdict import accepted, clash, needs_gpu, refused, tested

__all__ = ["DATA_ORDER"]

_OWN_ORDER = refused("hot switching reads documents in an order of its own", named="--dataloader-type")
_NO_MIDDLE = refused("hot switching reads documents from beginning to end")
_PHASES = tested(
    f"{WORKERS}test_option_bundles.py::test_each_phase_begins_with_the_first_samples_and_a_resume_keeps_the_bits"
)
_GROWS = tested(f"{BACKENDS}test_cpu_table.py::test_the_batch_grows")
_BLENDS = tested(f"{STRATEGIES}data/test_blends.py::test_a_run_on_a_blend_does_not_depend_on_the_strategies")
_HOT_SIZES = tested(f"{STRATEGIES}test_training.py::test_steps_have_as_many_sequences_as_megatron_says")
_CONVERSATIONS = tested(f"{STRATEGIES}data/test_conversations.py::test_hot_equals_static_on_conversations")
_WORKERS_SWITCH = tested(
    f"{STRATEGIES}data/test_conversations.py::test_workers_of_local_sgd_switch_on_conversations_and_resume_in_mid_interval"
)
_STAGES_PACK_NONE = refused(
    "Megatron lays the samples of a micro-batch one behind the other, and its stages send each other tensors of "
    "samples side by side",
    "give --micro-batch-size 1",
)
_ON_CONVERSATIONS = tested(f"{WORKERS}test_packed_documents.py::test_workers_on_conversations_end_equal_and_resume")
_ON_DOCUMENTS = tested(
    f"{WORKERS}test_packed_documents.py::test_a_worker_keeps_documents_apart_as_a_stock_job_does"
)
_IN_SAMPLES = refused("Megatron 0.19 counts phases in samples", "give --train-samples")
_REFUSED_ANYHOW = accepted("the row on --phase-transition-iterations has the say")
_NO_RAMP = refused("Megatron 0.19 reads it and ignores it")

DATA_ORDER = (
    row(
        "--dataloader-type external",
        says("dataloader_type", "external"),
        cpu=OWN_SCRIPT,
        local_sgd=OWN_SCRIPT.but(
            "--local-sgd-use-async",
            clash(
                "--local-sgd-use-async is not combined with --dataloader-type external, where nobody gives workers at "
                "different steps samples of their own",
                "drop one of them",
            ),
        ),
        hot_switch=_OWN_ORDER,
        sync_service=refused("samples that Megatron does not choose cannot be cut into the peers' parts"),
    ),
    row(
        "--phase-transition-iterations",
        cpu=_PHASES,
        local_sgd=_PHASES.but(
            "--local-sgd-use-async",
            clash(
                "--local-sgd-use-async is not combined with --phase-transition-iterations: its iterations are "
                "meetings, between which workers make numbers of steps that nobody knows before",
                "drop one of them",
            ),
        ),
        hot_switch=refused("sequences are counted from the first phase on, so that a new corpus would not begin at 0"),
        sync_service=refused("the peers' parts would have to be cut again in every phase"),
    ),
    row(
        "--phase-transition-iterations without --train-samples",
        lambda args: args.phase_transition_iterations is not None and args.train_samples is None,
        cpu=_IN_SAMPLES,
        local_sgd=_IN_SAMPLES,
        hot_switch=_REFUSED_ANYHOW,
        sync_service=_REFUSED_ANYHOW,
    ),
    row(
        "--rampup-batch-size",
        **everywhere(_NO_RAMP),
    ),
    row(
        "--step-batch-size-schedule",
        cpu=_GROWS,
        local_sgd=ROUNDS.but(
            "--local-sgd-use-async",
            clash(
                "--local-sgd-use-async is not combined with --step-batch-size-schedule: between two meetings a worker "
                "does not know how many samples all have made",
                "drop one of them",
            ),
        ),
        hot_switch=_HOT_SIZES,
        sync_service=refused("it counts the samples of the whole job, of which a peer makes a part"),
    ),
    row(
        "--decrease-batch-size-if-needed",
        cpu=ROUNDS,
        local_sgd=ROUNDS,
        hot_switch=_HOT_SIZES,
        sync_service=tested(f"{PEERS}test_resuming.py::test_steps_smaller_than_asked_are_counted_as_they_are"),
    ),
    row(
        "--sft without hot switching",
        lambda args: args.sft and not asks_to_switch(args),
        cpu=needs_gpu(
            "Megatron's unfused attention takes no packed samples, which it makes",
            "drop it, or use hot switching, which takes conversations one by one",
        ),
        local_sgd=_ON_CONVERSATIONS,
        hot_switch=accepted("the row on --sft has the say"),
        sync_service=PEER_ON_A_GPU,
    ),
    row(
        "--sft",
        cpu=_CONVERSATIONS,
        local_sgd=_WORKERS_SWITCH,
        hot_switch=_CONVERSATIONS,
        sync_service=tested(
            f"{PEERS}test_conversations.py"
            "::test_peers_on_conversations_end_equal_and_one_that_is_killed_resumes_with_the_same_bits"
        ),
    ),
    row(
        "--num-workers 0",
        says("num_workers", 0),
        cpu=BARE,
        local_sgd=APART,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        cpu_default={"num_workers": 0},
    ),
    row(
        "--dataloader-type",
        differs("dataloader_type", None, "single"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_OWN_ORDER,
        sync_service=PEERS_BUNDLE,
        peers_share="dataloader_type",
    ),
    row(
        "a blend of data",
        lambda args: args.data_path is not None and len(args.data_path) != 1,
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_BLENDS,
        sync_service=PEERS_BUNDLE,
        flags=("--data-path",),
    ),
    row(
        "data without --data-path (--data-args-path, --per-split-data-args-path or --train-data-path)",
        lambda args: not args.mock_data and args.data_path is None,
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=_BLENDS,
        sync_service=PEERS_BUNDLE,
        flags=("--data-args-path", "--per-split-data-args-path", "--train-data-path"),
    ),
    row("--fim-data", cpu=OWN_SCRIPT, local_sgd=OWN_SCRIPT, hot_switch=_NO_MIDDLE, sync_service=OWN_SCRIPT),
    row(
        "--dataloader-inter-document-masking",
        cpu=needs_gpu("Megatron's unfused attention takes no packed samples, which it makes"),
        local_sgd=_ON_DOCUMENTS,
        hot_switch=refused("hot switching keeps documents apart itself"),
        sync_service=PEER_ON_A_GPU,
        peers_share="dataloader_inter_document_masking",
    ),
    row(
        "--sft or --dataloader-inter-document-masking with pipeline stages and --micro-batch-size above 1",
        lambda args: (
            packs_documents(args)
            and args.pipeline_model_parallel_size > 1
            and (args.micro_batch_size or 1) > 1
        ),
        cpu=_STAGES_PACK_NONE,
        local_sgd=_STAGES_PACK_NONE,
        hot_switch=accepted("the row on --sft has the say"),
        sync_service=_STAGES_PACK_NONE,
    ),
    row(
        "--seed",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        peers_share="seed",
    ),
    row(
        "--seq-length",
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        peers_share="seq_length",
    ),
    row("--split", cpu=BUNDLE, local_sgd=BUNDLE, hot_switch=_BLENDS, sync_service=PEERS_BUNDLE, peers_share="split"),
    row(
        "--train-samples, or --train-iters times --global-batch-size",
        is_set("train_samples"),
        cpu=_GROWS,
        local_sgd=ROUNDS,
        hot_switch=_HOT_SIZES,
        sync_service=PEERS_BUNDLE,
        flags=("--train-samples", "--train-iters", "--global-batch-size"),
        peers_share=lambda args: args.train_samples or args.train_iters * args.global_batch_size,
    ),
    row(
        "--padded-vocab-size that --tensor-model-parallel-size does not divide",
        lambda args: bool(args.padded_vocab_size and args.padded_vocab_size % args.tensor_model_parallel_size),
        variables=("padded_vocab_size",),
        **everywhere(
            refused(
                "Megatron gives each tensor parallel rank as many rows, and fails where it builds the model",
                "have the rows padded where the checkpoint is made (docs/convert.md), or change one of them",
            )
        ),
    ),
    row(
        "--make-vocab-size-divisible-by below 1",
        lambda args: args.make_vocab_size_divisible_by < 1,
        flags=("--make-vocab-size-divisible-by",),
        **everywhere(
            refused(
                "Megatron pads the vocabulary to a multiple of it times the tensor parallel size, and fails",
                "give 1 or more, as 128, the default",
            )
        ),
    ),
    row(
        "vocabulary with its padding (--make-vocab-size-divisible-by)",
        is_set("make_vocab_size_divisible_by"),
        cpu=BUNDLE,
        local_sgd=BUNDLE,
        hot_switch=HOT_STATIC,
        sync_service=PEERS_BUNDLE,
        flags=("--make-vocab-size-divisible-by", "--padded-vocab-size"),
        peers_share="padded_vocab_size",
    ),
)
