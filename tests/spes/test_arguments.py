# SPDX-License-Identifier: Apache-2.0
"""Options of a SPES peer: the file's keys, what the command line replaces, and what is refused by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.spes.arguments import argument_problems, complete_arguments, ownership_of
from megatron_ext.spes.config import SpesConfig
from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig

FILE = """\
using_spes: true
spes_config:
  num_peers: 2
  peer_id: 0
  num_train_experts_per_node: 2
  expert_assignment: interleaved
  sync_steps: 4
  server_addr: {address}
"""
FLAGS = {
    "using_spes": True,
    "spes_num_train_experts_per_node": 2,
    "sync_service": "127.0.0.1:50051",
    "sync_service_index": 0,
    "sync_service_peers": 2,
}

SCALED = "--fp8-format, --fp4-format or --te-precision-config-file"
GROUPED_REFUSED = [
    ({"fp8": "e4m3"}, SCALED),
    ({"fp4": "e2m1"}, SCALED),
    ({"te_precision_config_file": "precision.yaml"}, SCALED),
    ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
    ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading"),
]


def parsed(**given: Any) -> SimpleNamespace:
    """Return arguments as Megatron parses them."""
    options = {**dict.fromkeys(SpesConfig().by_flag()), **SyncServiceConfig().by_flag()}
    defaults = {flag.removeprefix("--").replace("-", "_"): value for flag, value in options.items()}
    model = {
        "num_experts": 4,
        "moe_grouped_gemm": False,
        "transformer_impl": "transformer_engine",
        "fp8": None,
        "fp4": None,
        "te_precision_config_file": None,
        "use_transformer_engine_op_fuser": False,
        "fine_grained_activation_offloading": False,
        "expert_model_parallel_size": 1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_fusion": False,
        "cuda_graph_impl": "none",
        "enable_cuda_graph": False,
        "external_cuda_graph": False,
    }
    return SimpleNamespace(**{**defaults, "spes_config": None, **model, **given})


def completed(**given: Any) -> SimpleNamespace:
    args = parsed(**given)
    complete_arguments(args)
    return args


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "spes.yaml"
    path.write_text(FILE.format(address="127.0.0.1:50051"))
    return str(path)


def test_a_flag_replaces_what_the_file_says_also_by_a_default(file: str):
    args = completed(spes_config=file, spes_expert_assignment="contiguous")
    assert ownership_of(args).owners == ((0,), (0,), (1,), (1,))


def test_the_file_gives_the_options_of_the_sync_service(file: str):
    args = completed(spes_config=file)
    assert argument_problems(args) == [] and SyncServiceConfig.from_args(args).problems() == []
    found = {
        name: getattr(args, f"sync_service{name}") for name in ("", "_run", "_peer", "_peers", "_index", "_interval")
    }
    assert found == {
        "": "127.0.0.1:50051",
        "_run": "spes",
        "_peer": "node0",
        "_peers": 2,
        "_index": 0,
        "_interval": 4,
    }
    assert ownership_of(args).owners == ((0,), (1,), (0,), (1,))


def test_a_file_that_is_not_there_is_named_with_its_flag():
    with pytest.raises(UserError, match=r"^--spes-config /no/spes.yaml: cannot be read: No such file or directory$"):
        completed(spes_config="/no/spes.yaml")


def test_the_command_line_replaces_what_the_file_says(file: str):
    args = completed(spes_config=file, sync_service_index=1, sync_service_interval=7, sync_service_run="big")
    assert argument_problems(args) == []
    assert (args.sync_service_peer, args.sync_service_interval, args.sync_service_run) == ("node1", 7, "big")
    by_time = completed(spes_config=file, sync_service_interval_seconds=60.0)
    assert by_time.sync_service_interval is None and SyncServiceConfig.from_args(by_time).problems() == []


def test_flags_alone_are_enough():
    args = completed(**FLAGS)
    assert argument_problems(args) == [] and SyncServiceConfig.from_args(args).problems() == []
    # As in the paper's code unless said otherwise.
    assert args.sync_service_interval == 100 and ownership_of(args).owners == ((0,), (0,), (1,), (1,))


def test_without_spes_nothing_is_completed():
    args = completed()
    assert SpesConfig.from_args(args) == SpesConfig()
    assert SyncServiceConfig.from_args(args) == SyncServiceConfig()
    assert argument_problems(args) == [] and ownership_of(args) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sync_service": None}, "--using-spes needs --sync-service HOST:PORT (server_addr)"),
        ({"sync_service_index": None}, "--using-spes needs --sync-service-index (peer_id)"),
        ({"num_experts": None}, "--using-spes needs a mixture of experts"),
        ({"num_experts": 6}, "--spes-num-train-experts-per-node is 2, which with 2 peers makes 4 experts"),
        ({"using_spes": False}, "--spes-num-train-experts-per-node has no effect without --using-spes; add it"),
        ({"spes_num_train_experts_per_node": None}, "nothing says who owns which experts; give one of --spes-num"),
        *(
            ({"moe_grouped_gemm": True, **options}, f"--moe-grouped-gemm with frozen experts does not go with {name}")
            for options, name in GROUPED_REFUSED
        ),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized is not supported"),
        (
            {"spes_using_decayed_aux_loss": True, "moe_router_load_balancing_type": ["sinkhorn"]},
            "--spes-using-decayed-aux-loss has no effect with --moe-router-load-balancing-type sinkhorn",
        ),
        (
            {"spes_using_decayed_aux_loss": True, "moe_router_fusion": True},
            "--spes-using-decayed-aux-loss weights token counts, and only a GPU can show",
        ),
        (
            {"spes_using_decayed_aux_loss": True, "cuda_graph_impl": "local"},
            "--spes-using-decayed-aux-loss weights token counts by factors that change from step to step",
        ),
    ],
)
def test_what_does_not_work_is_named(change: dict[str, Any], sentence: str):
    problems = argument_problems(completed(**{**FLAGS, **change}))
    assert [problem for problem in problems if problem.startswith(sentence)], problems


def test_a_peer_that_there_is_not_is_the_sync_services_to_name():
    args = completed(**{**FLAGS, "sync_service_index": 7, "moe_grouped_gemm": True, "fp8": "e4m3"})
    assert argument_problems(args) == []
    problems = SyncServiceConfig.from_args(args).problems()
    assert [problem for problem in problems if problem.startswith("--sync-service-index is 7")], problems


def test_frozen_experts_may_be_grouped():
    assert argument_problems(completed(**FLAGS, moe_grouped_gemm=True)) == []


@pytest.mark.parametrize(("options", "name"), GROUPED_REFUSED)
def test_where_nothing_is_frozen_grouped_experts_go_with_everything(options: dict[str, Any], name: str):
    everywhere = {**FLAGS, "spes_num_train_experts_per_node": 4, "moe_grouped_gemm": True}
    assert argument_problems(completed(**everywhere, **options)) == []


@pytest.mark.parametrize("assignment", ["contiguous", "interleaved"])
def test_ranks_need_not_have_own_experts(assignment: str):
    options = {**FLAGS, "expert_model_parallel_size": 2, "spes_expert_assignment": assignment}
    assert argument_problems(completed(**options)) == []


def test_a_file_that_asks_for_nothing_is_refused(tmp_path: Path):
    path = tmp_path / "spes.yaml"
    path.write_text("spes_config: {num_peers: 2}\n")
    try:
        problems = argument_problems(completed(spes_config=str(path)))
    except UserError as error:
        problems = [str(error)]
    assert "using_spes" in problems[0]
