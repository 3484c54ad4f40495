# SPDX-License-Identifier: Apache-2.0
"""Rows on checkpoints."""

from __future__ import annotations

from megatron_ext.options.common_verdicts import (
    ASYNC_SAVE,
    BACKENDS,
    BOOKKEEPING,
    EXPERTS_ASYNC_SAVE,
    HOT_ASYNC_SAVE,
    HOT_BOOKKEEPING,
    HOT_OTHER_WAYS,
    HOT_SKIPPED,
    OTHER_WAYS,
    PAIRWISE,
    PEERS,
    PEERS_ASYNC_SAVE,
    PEERS_BUNDLE,
    RESILIENCY,
    STRATEGIES,
    WORKERS,
    WORKERS_BOOKKEEPING,
    WORKERS_OTHER_WAYS,
)
from megatron_ext.options.row import Asked, everywhere, row, says
from megatron_ext.options.verdict import OptionVerdict, clash, needs_gpu, refused, tested
from megatron_ext.phrases import as_option

__all__ = ["CHECKPOINTS"]

_REPLACE = tested(f"{BACKENDS}test_cpu_table.py::test_non_persistent_checkpoints_replace_each_other")
_DUMPS = tested(f"{BACKENDS}test_cpu_table.py::test_dumps_have_every_parameter")
_WORKERS_DUMPS = tested(f"{WORKERS}test_dumps.py::test_a_worker_dumps_what_a_job_of_its_own_would")
_WORKERS_DUMPS_ON_TE = tested(f"{WORKERS}test_dumps.py::test_what_goes_through_layers_is_dumped_by_worker")
_PEERS_DUMPS_ON_TE = tested(
    f"{PEERS}test_dumps.py::test_what_goes_through_a_peers_layers_is_dumped_as_in_a_job_of_its_own"
)
_SKIPPED = tested(
    f"{WORKERS}test_option_bundles.py::test_skipped_iterations_are_no_steps_and_a_resume_keeps_the_bits"
)
_WEIGHTS = tested(f"{BACKENDS}test_cpu_resume.py::test_weights_alone_can_be_saved_and_loaded")
_FRESH = tested(
    f"{WORKERS}test_checkpoint.py::test_a_sync_point_loads_without_optimizer_state_and_starts_a_fresh_outer_one"
)
_HOT_WEIGHTS = tested(f"{STRATEGIES}test_checkpoints.py::test_the_weights_alone_begin_with_a_fresh_optimizer")
_HOT_FINETUNE = tested(f"{STRATEGIES}test_checkpoints.py::test_finetuning_begins_with_the_first_sequence")
_HOT_BEGINS = tested(
    f"{STRATEGIES}test_checkpoints.py::test_weights_saved_without_an_optimizer_begin_another_run_with_any_home"
)
_PEERS_BEGIN = tested(
    f"{PEERS}test_option_bundles.py::test_a_peer_begins_with_a_checkpoint_as_a_stock_job_does"
)
_MOVES = tested(f"{BACKENDS}test_cpu_resume.py::test_an_iteration_that_is_overridden_moves_the_place_in_the_data")
_EAGER = "--local-sgd-eager-updates"


def _never_equal(method: str) -> OptionVerdict:
    return clash(
        f"{method} is not combined with --no-save-optim, which saves the weights that all workers had last",
        "drop one of them",
    )


_SYNCED_WEIGHTS = (
    tested(f"{WORKERS}checkpoints/test_weights_alone.py::test_weights_alone_are_those_of_the_last_round")
    .but(PAIRWISE, _never_equal(PAIRWISE))
    .but(_EAGER, _never_equal(_EAGER))
)
_MOVES_NO_ROUND = tested(
    f"{WORKERS}test_checkpoint.py::test_an_iteration_that_is_overridden_moves_the_place_in_the_data_and_no_round"
).but(
    "--local-sgd-use-async",
    clash(
        "--local-sgd-use-async is not combined with --override-ckpt-iteration: its iterations are meetings, from whose "
        "number nobody knows how many samples came before",
        "begin at iteration 0 with the checkpoint's weights (--finetune), or drop one of them",
    ),
)
_HOT_MOVES = tested(
    f"{STRATEGIES}test_checkpoints.py::test_the_place_in_the_data_follows_an_iteration_that_is_overridden"
)
_MAIN_VALUES = "test_main_values_in_fp32_are_those_of_a_checkpoint_in_fp32"
_READ_IN_LOW_PRECISION = refused(
    "Megatron reads weights of other formats in the run's own precision, so that the main values are rounded first",
    "add --ckpt-format torch and load a checkpoint in that format, or drop it",
)
_TAKES_NONE = refused(
    "Megatron's other optimizers take their main values from the model, whatever it says",
    "add --use-distributed-optimizer, or drop it",
)
_CHANGED_IN_PLACE = refused(
    "in fp32 Megatron's loss changes in place what its hooks for these gradients have taken, and the first step fails",
    "add --bf16, or drop it",
)
_ROWS_OF_ONE_RANK = refused(
    "Megatron dumps of parameters the rows that one rank has, and of gradients none",
    "save checkpoints instead, or drop one of them",
)
_NO_FOLDER = refused("Megatron dumps into the folder of --save", "give --save, or drop it")
_SUMS_OF_ONE_INSTANCE = refused(
    "Megatron adds up the gradients of all instances in the part alone that a rank's optimizer reads, so that the rest "
    "of a dump is of one instance",
    "drop one of them",
)
_HOT_DUMPS = tested(f"{STRATEGIES}test_checkpoints.py::test_dumps_have_the_gradients_of_all_strategies")
_LAYERS_OF_HOME = refused(
    "Megatron looks into the layers of the model that it builds, home's; what guests compute would be missing"
)
_NO_TYPE = refused(
    "Megatron fails at the first of these checkpoints", "add --non-persistent-ckpt-type global, or drop it"
)
_NAME_ALONE = refused("Megatron 0.19 has no such checkpoints, but the name", "use --non-persistent-ckpt-type global")


def _dumps(variable: str, asked: Asked) -> Asked:
    return lambda args: getattr(args, variable) is not None and bool(asked(args))


CHECKPOINTS = (
    row(
        "--save-retain-interval",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--no-save-rng",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--no-load-rng",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--no-save-optim",
        cpu=_WEIGHTS,
        local_sgd=_SYNCED_WEIGHTS,
        hot_switch=_HOT_BEGINS,
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--no-load-optim",
        cpu=_WEIGHTS,
        local_sgd=_FRESH,
        hot_switch=_HOT_WEIGHTS,
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--finetune",
        cpu=_WEIGHTS,
        local_sgd=_FRESH,
        hot_switch=_HOT_FINETUNE,
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--pretrained-checkpoint",
        cpu=_WEIGHTS,
        local_sgd=_FRESH,
        hot_switch=_HOT_BEGINS,
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--load-main-params-from-ckpt",
        cpu=tested(f"{BACKENDS}test_cpu_resume.py::{_MAIN_VALUES}"),
        local_sgd=tested(f"{WORKERS}test_legacy_format.py::{_MAIN_VALUES}"),
        hot_switch=tested(f"{STRATEGIES}test_checkpoints.py::{_MAIN_VALUES}"),
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--load-main-params-from-ckpt without --ckpt-format torch",
        lambda args: args.load_main_params_from_ckpt and args.ckpt_format != "torch",
        **everywhere(_READ_IN_LOW_PRECISION),
    ),
    row(
        "--load-main-params-from-ckpt without --use-distributed-optimizer",
        lambda args: args.load_main_params_from_ckpt and not args.use_distributed_optimizer,
        **everywhere(_TAKES_NONE),
    ),
    row(
        "--override-ckpt-iteration",
        cpu=_MOVES,
        local_sgd=_MOVES_NO_ROUND,
        hot_switch=_HOT_MOVES,
        sync_service=_PEERS_BEGIN,
    ),
    row(
        "--use-checkpoint-args",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_OTHER_WAYS,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--use-mp-args-from-checkpoint-args",
        cpu=OTHER_WAYS,
        local_sgd=WORKERS_OTHER_WAYS,
        hot_switch=HOT_OTHER_WAYS,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--auto-detect-ckpt-format",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--exit-on-missing-checkpoint",
        cpu=BOOKKEEPING,
        local_sgd=WORKERS_BOOKKEEPING,
        hot_switch=HOT_BOOKKEEPING,
        sync_service=PEERS_BUNDLE,
    ),
    *(
        row(
            f"--save-{what}-interval",
            cpu=_DUMPS,
            local_sgd=_WORKERS_DUMPS,
            hot_switch=_HOT_DUMPS,
            sync_service=PEERS_BUNDLE,
        )
        for what in ("params", "wgrads")
    ),
    *(
        row(
            f"--save-{what}-interval",
            cpu=needs_gpu("Megatron looks for the layers of Transformer Engine, and fails where there is none"),
            local_sgd=_WORKERS_DUMPS_ON_TE,
            hot_switch=_LAYERS_OF_HOME,
            sync_service=_PEERS_DUMPS_ON_TE,
        )
        for what in ("activations", "dgrads", "tokens-per-expert")
    ),
    *(
        row(
            f"--save-{what}-interval with --use-torch-fsdp2",
            _dumps(f"save_{what}_interval", lambda args: args.use_torch_fsdp2),
            variables=(f"save_{what}_interval",),
            **everywhere(_ROWS_OF_ONE_RANK),
        )
        for what in ("params", "wgrads")
    ),
    *(
        row(
            f"{as_option(variable)} without --save",
            _dumps(variable, lambda args: args.save is None),
            variables=(variable,),
            **everywhere(_NO_FOLDER),
        )
        for variable in (
            *("save_params_interval", "save_wgrads_interval", "save_activations_interval", "save_dgrads_interval"),
            "save_tokens_per_expert_interval",
        )
    ),
    row(
        "--save-wgrads-interval with --num-distributed-optimizer-instances",
        _dumps("save_wgrads_interval", lambda args: args.num_distributed_optimizer_instances > 1),
        variables=("save_wgrads_interval",),
        **everywhere(_SUMS_OF_ONE_INSTANCE),
    ),
    row(
        "--save-dgrads-interval without --bf16 or --fp16",
        _dumps("save_dgrads_interval", lambda args: not (args.bf16 or args.fp16)),
        variables=("save_dgrads_interval",),
        **everywhere(_CHANGED_IN_PLACE),
    ),
    row(
        "--async-save",
        cpu=ASYNC_SAVE,
        local_sgd=tested(f"{WORKERS}test_async_save.py::test_what_is_written_is_what_was_saved"),
        hot_switch=HOT_ASYNC_SAVE,
        sync_service=PEERS_ASYNC_SAVE,
        spes=EXPERTS_ASYNC_SAVE,
    ),
    row(
        "--non-persistent-save-interval without --non-persistent-ckpt-type",
        _dumps("non_persistent_save_interval", lambda args: args.non_persistent_ckpt_type is None),
        variables=("non_persistent_save_interval",),
        **everywhere(_NO_TYPE),
    ),
    row(
        "--non-persistent-ckpt-type global",
        says("non_persistent_ckpt_type", "global"),
        cpu=_REPLACE,
        local_sgd=_SKIPPED,
        hot_switch=HOT_SKIPPED,
        sync_service=PEERS_BUNDLE,
    ),
    row(
        "--non-persistent-ckpt-type local",
        says("non_persistent_ckpt_type", "local"),
        **everywhere(RESILIENCY),
    ),
    row(
        "--non-persistent-ckpt-type in_memory",
        says("non_persistent_ckpt_type", "in_memory"),
        **everywhere(_NAME_ALONE),
    ),
)
