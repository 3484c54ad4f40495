# SPDX-License-Identifier: Apache-2.0
"""Options of training with hot switching: every mistake is named, all together, before anything starts."""

import re

import pytest

from tests.hot_switch.runs import arguments
from tests.support.distributed import run_ranks
from tests.support.heterogeneous import LINEAR_LAYERS
from tests.support.parsers import full_parser
from tests.support.presets import DELTA_NET, toy_gpt
from tests.support.pretrain import run_failing_pretrain, run_pretrain

HOME_AND_GUEST = (["1,2,1", "2,1,1"], [32, 8, 0])
NOT_WITH_IT = {
    "softmax_type": "off-by-one",
    "cuda_graph_impl": "local",
    "num_experts": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": ["global_aux_loss", "quantile_balancing"],
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "hierarchical_context_parallel_sizes": [1, 1],
    "use_local_sgd": True,
    "local_sgd_workers": 1,
    "local_sgd_sync_in_forward": True,
    "dataloader_type": "cyclic",
    "dataloader_inter_document_masking": True,
    "fim_data": True,
    "window_size": "8,8",
    "position_embedding_type": "relative",
    "multi_latent_attention": True,
    "mla_down_proj_fusion": True,
    "spec": ["module", "layers"],
    "transformer_impl": "inference_optimized",
    "fp8_format": "hybrid",
    "tp_comm_overlap": True,
    "te_rng_tracker": True,
    "log_max_attention_logit": True,
    "moe_routing_trace_path": "somewhere",
    "logits_load_dir": "somewhere",
    "check_for_spiky_loss": True,
    "overlap_moe_expert_parallel_comm": True,
    "fine_grained_activation_offloading": True,
    "use_te_activation_func": True,
}
PREDICTION = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
CASES = {
    "ranks and lengths": (
        arguments(["1,2,1", "2,2,1"], [16, 8, 0]),
        [
            "strategy 2,2,1 is for 4 ranks, but the job has 2",
            "the first bucket size is 16, but the sequence length is 32",
        ],
    ),
    "ranks of a worker": (
        arguments(["1,2,1", "1,1,2"], [32, 8, 0], use_local_sgd=True, local_sgd_workers=2, local_sgd_sync_interval=2),
        ["strategy 1,2,1 is for 2 ranks, but each of 2 workers has 1", "product dp*tp*pp*cp is 1"],
    ),
    "workers that cannot be, of which local SGD complains": (
        arguments(["1,4,1", "4,1,1"], [32, 8, 0], use_local_sgd=True, local_sgd_workers=3, local_sgd_sync_interval=2),
        [],
    ),
    "experts under tensor parallelism": (
        arguments(["1,2,1", "2,1,1"], [32, 8, 0], num_experts=2),
        [
            "strategy 1,2,1: Megatron trains experts under tensor parallelism only with sequence parallelism",
            "strategy 1,2,1: Megatron does not train experts with biases on etp = 2 ranks; use etp 1, or give",
            "strategy 2,1,1: Megatron does not train experts with biases without expert parallelism on its local",
        ],
    ),
    "guests of home's experts": (
        arguments(
            ["2,1,1", "1,2,1"], [32, 8, 0], num_experts=2, expert_model_parallel_size=2, disable_bias_linear=True
        ),
        [],
    ),
    "experts with biases that Megatron trains": (
        arguments(["2,1,1", "1,1,2"], [32, 8, 0], num_experts=2, transformer_impl="transformer_engine"),
        [],
    ),
    "parts of rows": (
        arguments(
            ["1,1,1", "1,1,1"],
            [32, 10, 0],
            context_parallel_size=2,
            hot_switch_attention="rows",
            reset_attention_mask=True,
        ),
        ["rows of its bucket, 10 tokens, cannot be divided by 4 (2*cp"],
    ),
    "parts of rows with a mask": (
        arguments(
            ["1,1,1", "1,1,1"],
            [32, 8, 0],
            context_parallel_size=2,
            hot_switch_attention="rows",
            reset_attention_mask=True,
        ),
        [
            "strategy 1,1,1 cp2: --hot-switch-attention rows needs whole rows",
            "home evaluates with context parallelism, where attention takes no mask; drop --reset-attention-mask",
        ],
    ),
    "form": (arguments(["1,2,1", "2;1"], [32, 8, 0]), ['strategy "2;1" is not of the form dp,tp,pp']),
    "number of buckets": (arguments(["1,2,1", "2,1,1"], [32, 0]), ["2 strategies need 3 bucket sizes"]),
    "layers": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], num_layers=3),
        ["3 layers cannot be divided over pp*vpp = 2 chunks"],
    ),
    "stages of a pipeline of one": (
        arguments(*HOME_AND_GUEST, num_virtual_stages_per_pipeline_rank=2, decoder_first_pipeline_num_layers=1),
        [
            "strategy 1,2,1: a pipeline of one stage has nothing to divide unevenly; change "
            "--num-virtual-stages-per-pipeline-rank, --decoder-first-pipeline-num-layers"
        ],
    ),
    "a list of stages that is none": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], pipeline_model_parallel_layout="Et|tx"),
        ["strategy 1,1,2: Invalid layer character: x", "change --pipeline-model-parallel-layout"],
    ),
    "a list of too few stages": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], pipeline_model_parallel_layout="Et|t|L"),
        ["strategy 1,1,2: the layout has 3 stages, which 2 pipeline ranks cannot share; change --pipeline-model"],
    ),
    "a list of other layers": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], pipeline_model_parallel_layout="Ettt|L"),
        ["strategy 1,1,2 layers3-0: stage_layers adds up to 3, but the model has 2 layers"],
    ),
    "layers for multi-token prediction in a stage before the last": (
        arguments(
            ["1,1,2", "2,1,1"],
            [32, 8, 0],
            **PREDICTION,
            untie_embeddings_and_output_weights=True,
            pipeline_model_parallel_layout="Ettm|L",
        ),
        ["strategy 1,1,2: layers for multi-token prediction (m) are moved between strategies in the last stage only"],
    ),
    "tied embeddings of multi-token prediction": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], **PREDICTION),
        ["strategy 1,1,2: layout: multi-token prediction over several stages is not laid out with tied embeddings"],
    ),
    "learned positions of multi-token prediction": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], mtp_num_layers=1, untie_embeddings_and_output_weights=True),
        ["strategy 1,1,2: layout: multi-token prediction over several stages is not laid out with learned positions"],
    ),
    "chunks that do not divide": (
        arguments(["1,1,2", "2,1,1"], [32, 8, 0], num_layers_per_virtual_pipeline_stage=3),
        ["strategy 1,1,2: 2 layers cannot be cut into chunks of that size on 2 stages; change --num-layers"],
    ),
    "experts of stages before replicas": (
        arguments(
            ["2,1,2", "4,1,1"],
            [32, 8, 0],
            use_tp_pp_dp_mapping=True,
            num_experts=2,
            expert_model_parallel_size=2,
        ),
        ["strategy 2,1,2 ep2: with --use-tp-pp-dp-mapping Megatron needs as many replicas of experts as of the rest"],
    ),
    "rows of sequence parallelism": (
        arguments(["2,1,1", "1,2,1"], [32, 9, 0], sequence_parallel=True),
        ["rows of its bucket, 9 tokens, cannot be divided by 2"],
    ),
    "another home": (
        arguments(*HOME_AND_GUEST, tensor_model_parallel_size=4, pipeline_model_parallel_size=2),
        [
            "--tensor-model-parallel-size is 4, but the first of --hot-switch-strategies, which is home, says 2",
            "--pipeline-model-parallel-size is 2, but the first of --hot-switch-strategies, which is home, says 1",
        ],
    ),
    "planning": (
        arguments(
            *HOME_AND_GUEST,
            hot_switch_algorithm="best",
            hot_switch_gpus_per_node=0,
            hot_switch_attention="all",
            hot_switch_direct_bytes=-1,
        ),
        [
            "--hot-switch-direct-bytes is -1; it must be 0 to 1099511627776",
            *("-algorithm best is not known", "-gpus-per-node is 0", "-attention all is not known"),
        ],
    ),
    "what does not go with it": (
        arguments(*HOME_AND_GUEST, **NOT_WITH_IT),
        ["--position-embedding-type relative is not supported: "]
        + [
            f"{option} is not supported with hot switching: "
            for option in (
                *("--softmax-type", "--hierarchical-context-parallel-sizes"),
                *("--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor"),
                "--cuda-graph-impl, --enable-cuda-graph or --external-cuda-graph",
                *(
                    "--moe-router-load-balancing-type global_aux_loss",
                    "--moe-router-load-balancing-type quantile_balancing",
                ),
                *(
                    "--local-sgd-sync-in-forward",
                    "--dataloader-type",
                ),
                *("--dataloader-inter-document-masking", "--fim-data", "--window-size other than N,0"),
                *("--mla-down-proj-fusion", "--spec"),
                *("--transformer-impl inference_optimized", "--tp-comm-overlap", "--log-max-attention-logit"),
                *("--moe-routing-trace-path", "--logits-load-dir", "--check-for-spiky-loss"),
                "--overlap-moe-expert-parallel-comm",
                "--fp8-format, --fp4-format or --te-precision-config-file",
                "--cpu-offloading-num-layers or --fine-grained-activation-offloading",
                *("--te-rng-tracker", "--use-te-activation-func"),
            )
        ],
    ),
    "data that are not there": (
        arguments(*HOME_AND_GUEST, mock_data=False, train_data_path=["0.3", "some", "0.7", "other"]),
        ["--train-data-path some: there is no some.bin", "--train-data-path other: there is no other.bin"],
    ),
    "data named twice": (
        arguments(*HOME_AND_GUEST, mock_data=False, train_data_path=["some"], data_path=["other"]),
        ["there is --data-path, --train-data-path; give one of them"],
    ),
    "masks for Transformer Engine": (
        arguments(*HOME_AND_GUEST, transformer_impl="transformer_engine", hot_switch_attention="rows"),
        ["--hot-switch-attention rows with --transformer-impl transformer_engine is not supported with hot switching"],
    ),
    "Transformer Engine": (arguments(*HOME_AND_GUEST, transformer_impl="transformer_engine"), []),
    "Gated DeltaNet in packed rows": (
        arguments(*HOME_AND_GUEST, sequence_parallel=True, hot_switch_attention="documents", **DELTA_NET),
        ["--experimental-attention-variant gated_delta_net is not supported with hot switching: its layers"],
    ),
    "Gated DeltaNet whose norms drift apart": (
        arguments(*HOME_AND_GUEST, **DELTA_NET),
        ["strategy 1,2,1: Megatron all-reduces the gradients of Gated DeltaNet's norms over tensor-parallel ranks"],
    ),
    "Gated DeltaNet with fewer heads than ranks": (
        arguments(*HOME_AND_GUEST, sequence_parallel=True, **{**DELTA_NET, "linear_num_key_heads": 1}),
        ["strategy 1,2,1: linear_num_key_heads 1 cannot be divided over tp*cp = 2"],
    ),
    "linear layers with sequence parallelism at a guest": (
        arguments(
            ["2,1,1", "1,2,1"],
            [32, 8, 0],
            sequence_parallel=True,
            heterogeneous_layers_config_path=str(LINEAR_LAYERS),
        ),
        ["strategy 1,2,1: Megatron gathers the outputs of linear layers along another axis with sequence parallelism"],
    ),
    "Gated DeltaNet without a frequency": (
        arguments(*HOME_AND_GUEST, sequence_parallel=True, **{**DELTA_NET, "linear_attention_freq": None}),
        [],
    ),
    "Gated DeltaNet": (arguments(*HOME_AND_GUEST, sequence_parallel=True, **DELTA_NET), []),
    "nodes": (
        arguments(["3,1,1", "1,3,1"], [32, 8, 0], hot_switch_gpus_per_node=2),
        ["--hot-switch-gpus-per-node is 2, but 3 ranks do not fill such nodes"],
    ),
    "no buckets": (
        toy_gpt(hot_switch_strategies=["2,1,1"]),
        ["--hot-switch-strategies needs --hot-switch-bucket-sizes"],
    ),
    "no strategies": (
        toy_gpt(hot_switch_bucket_sizes=[32, 0]),
        ["--hot-switch-bucket-sizes has no effect without --hot-switch-strategies"],
    ),
    "batch": (
        arguments(["2,1,1", "1,2,1"], [32, 8, 0], global_batch_size=7),
        [
            "--global-batch-size is 7, which is not a multiple of home's dp 2 times its micro-batch size 1",
            "give 6 or 8",
        ],
    ),
    "batches of a schedule": (
        arguments(
            ["2,1,1", "1,2,1"], [32, 8, 0], global_batch_size=None, step_batch_size_schedule="0:8 1K:7"
        ),
        ["the batch size 7 is not a multiple of home's dp 2 times its micro-batch size 1; give 6 or 8"],
    ),
    "a schedule that falls": (
        arguments(
            ["2,1,1", "1,2,1"], [32, 8, 0], global_batch_size=None, step_batch_size_schedule="0:8 1K:4"
        ),
        ["the batch size falls from 8 to 4, and Megatron stops where"],
    ),
    "no micro-batch": (
        arguments(["2,1,1", "1,2,1"], [32, 8, 0], micro_batch_size=0),
        ["strategy 2,1,1: micro_batch_size is 0"],
    ),
    "nothing wrong": (arguments(*HOME_AND_GUEST), []),
    "nothing asked for": (toy_gpt(), []),
}


def problems_of(command_lines):
    """What hot switching says about each command line of a job of two ranks."""
    from megatron_ext.features import all_features

    parser = full_parser()
    (hot_switch,) = (feature for feature in all_features() if feature.name == "hot-switch")
    found = []
    for line in command_lines:
        args = parser.parse_args(line)
        args.world_size = 3 if "3,1,1" in line else 4 if "4,1,1" in line and "2,1,2" in line else 2
        found.append(hot_switch.validate(args))
    return found


def test_every_mistake_is_named():
    (found,) = run_ranks(problems_of, 1, [line for line, _ in CASES.values()])
    for (name, (_, expected)), problems in zip(CASES.items(), found, strict=True):
        said = "\n".join(problems)
        assert [part for part in expected if part not in said] == [], (name, said)
        assert expected or not problems, (name, problems)


def test_mistakes_in_and_beside_a_strategy_file_are_named(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text("strategies: [{dp: 1, tp: 2, pp: 1}, {dp: 1, tp: 1, pp: 1, cp: 2, ep: 1}]")
    bare = toy_gpt(hot_switch_strategy_file=str(file))
    listed = tmp_path / "listed.yaml"
    listed.write_text(
        "bucket_sizes: [32, 8, 0]\nstrategies: [{dp: 1, tp: 1, pp: 2, vpp: 3}, {dp: 2, tp: 1, pp: 1, vpp: 2}]"
    )
    recomputation = {"recompute_granularity": "selective", "recompute_activations": True}
    both = arguments(*HOME_AND_GUEST, hot_switch_strategy_file=str(file), **recomputation)
    with_model = toy_gpt(hot_switch_strategy_file=str(listed))
    listed_too = toy_gpt(hot_switch_strategy_file=str(listed), microbatch_group_size_per_virtual_pipeline_stage=4)
    lines = [bare, both, with_model, listed_too]
    in_file, beside, in_list, twice = run_ranks(problems_of, 1, lines)[0]
    assert "--microbatch-group-size-per-virtual-pipeline-stage is not read with --hot-switch-strategy-file" in twice[0]
    assert "pp*vpp = 6 chunks" in in_list[0] and "strategy 2,1,1 vpp2" in in_list[0]
    assert "no list 'bucket_sizes'" in in_file[0]
    for option, field in (
        ("--hot-switch-strategies", "strategies"),
        ("--hot-switch-bucket-sizes", "bucket_sizes"),
        ("--recompute-granularity", "each strategy's recompute"),
        ("--recompute-activations", "each strategy's recompute"),
    ):
        said = f"{option} is not read with --hot-switch-strategy-file; drop it, and write {field} into the file"
        assert said in "\n".join(beside)


def recomputation_of(command_line):
    """What the strategies of a command line recompute, home's first."""
    from megatron_ext.hot_switch.arguments import strategies_of

    args = full_parser().parse_args(command_line)
    args.world_size = 2
    return [strategy.recompute for strategy in strategies_of(args).strategies]


@pytest.mark.parametrize("option", [{"recompute_activations": True}, {"recompute_granularity": "selective"}])
def test_what_is_recomputed_is_so_under_all_strategies(option):
    assert run_ranks(recomputation_of, 1, arguments(*HOME_AND_GUEST, **option)) == [["selective", "selective"]]


def test_bad_options_end_the_run_with_one_error_and_no_traceback():
    exits = run_failing_pretrain(arguments(["1,2,1", "2,2,1"], [32, 8, 0], tp_comm_overlap=True), 2)
    assert all(rank.exit_code != 0 for rank in exits)
    assert "strategy 2,2,1 is for 4 ranks, but the job has 2" in exits[0].stderr
    assert "--tp-comm-overlap is not supported with hot switching" in exits[0].stderr
    assert "Traceback" not in exits[0].stderr


_counted: list = []


def watch_flops():
    """Note for how many tokens Megatron computes its FLOP/s."""
    from megatron.training import training

    original = training.num_floating_point_operations

    def watched(*args, total_real_tokens_in_batch=None, **kwargs):
        _counted.append(total_real_tokens_in_batch)
        return original(*args, total_real_tokens_in_batch=total_real_tokens_in_batch, **kwargs)

    training.num_floating_point_operations = watched


def counted_positions(model, optimizer, args):
    """What was noted."""
    return sorted(set(_counted))


def test_what_hot_switching_decides_is_said():
    command = arguments(*HOME_AND_GUEST, train_iters=1, calculate_per_token_loss=None)
    first, last = run_pretrain(command, 2, before=watch_flops, probe=counted_positions)
    for part in (
        "hot switching: home 1,2,1 for 8 < positions <= 32, guest 2,1,1 for 0 < positions <= 8",
        "--calculate-per-token-loss is set",
        "hot switching: guest 2,1,1 takes",
        "sequences per epoch, 8 per step, 0 read before",
    ):
        assert part in first.stdout
    # Megatron's FLOP/s are those of the documents, not of sequences of --seq-length.
    tokens = re.search(r"tokens: (\d+)", last.stdout)
    assert tokens is not None and 8 < int(tokens[1]) < 8 * 32
    assert first.probe == last.probe == [int(tokens[1])]


def test_the_first_size_of_a_schedule_is_said():
    schedule = {"global_batch_size": None, "step_batch_size_schedule": "0:8 1K:16"}
    first = run_pretrain(arguments(*HOME_AND_GUEST, train_iters=1, **schedule), 2)[0]
    assert "sequences per epoch, 8 per step, 0 read before" in first.stdout


def problems_on(architecture, connections, lines):
    """What hot switching says where GPUs are of an architecture, and a variable of the environment has a value."""
    import os

    import torch
    from megatron.training.utils import common_utils

    torch.cuda.is_available = lambda: True
    common_utils.get_device_arch_version = lambda: architecture
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    return problems_of(lines)


@pytest.mark.parametrize(("architecture", "connections"), [(9, None), (9, "8"), (9, "1"), (10, None)])
def test_guests_that_need_a_single_connection_are_told_at_the_start(architecture, connections):
    lines = [arguments(["2,1,1", "1,2,1"], [32, 8, 0]), arguments(["1,1,2", "2,1,1"], [32, 8, 0])]
    ((cut, whole),) = run_ranks(problems_on, 1, architecture, connections, lines)
    said = "strategy 1,2,1: on this GPU tensor and context parallelism need the environment variable CUDA_DEVICE_MAX"
    assert any(said in problem for problem in cut) is (architecture == 9 and connections != "1")
    assert whole == []
