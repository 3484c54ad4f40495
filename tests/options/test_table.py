# SPDX-License-Identifier: Apache-2.0
"""The table of options: what it refuses, what it promises, and that the docs say the same."""

import ast
import dataclasses
import re
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_ext.options import FEATURES, ROWS, Row, refusals
from megatron_ext.options.common_verdicts import AS_ANY_JOB, ON_A_GPU, OWN_SCRIPT, PEER_ON_A_GPU
from megatron_ext.options.verdict import CIRCUMSTANCES, OptionVerdict, accepted, refused
from megatron_ext.support import markdown
from tests.backends.test_cpu_options import REFUSED as NEEDS_A_GPU
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.heterogeneous import LINEAR_LAYERS

WITHOUT_A_TEST = {
    ON_A_GPU.reason,
    PEER_ON_A_GPU.reason,
    OWN_SCRIPT.reason,
    "the groups of workers are made without it",
    AS_ANY_JOB.reason,  # of the one below
    # Another row says it.
    "the row on --use-distributed-optimizer has the say",
    "the row on formats other than torch_dist and torch has the say",
    "the row on --sft has the say",
    "the row on --experimental-attention-variant has the say",
    "each variant has a row of its own",
    "the row on --phase-transition-iterations has the say",
    "each format has a row of its own",
    "a script that does not train has no use for it",
    "it says nothing without --hybrid-layer-pattern",
    "it is read with --moe-expert-capacity-factor alone, which is refused",
    "what is said of each of them holds",
    "strategies have stages of their own, and are checked one by one",
    "each strategy has sizes of its own, and is checked by itself",
}
"""Why an option is accepted and names no test: there is no other reason."""


def all_verdicts():
    """Every option with every feature's verdict on it, those under a circumstance included."""
    for row in ROWS:
        for feature, verdict in row.verdicts.items():
            for each in (verdict, *verdict.exceptions.values()):
                yield row.option, feature, each


def test_the_docs_are_the_table():
    assert (REPOSITORY / "docs" / "support-table.md").read_text(encoding="utf-8") == markdown()


def test_what_the_parameter_view_does_not_know_is_refused_where_options_are_read():
    from megatron_ext.params.live_model import UNSUPPORTED_OPTIONS

    rows = {row.option: row for row in ROWS}
    # Kitchen's options are there only where that library is.
    for field in UNSUPPORTED_OPTIONS.keys() - {"use_kitchen"}:
        verdicts = rows["--" + field.replace("_", "-")].verdicts
        assert all(verdicts[feature].refuses for feature in ("local-sgd", "hot-switch", "sync-service")), field


def test_peers_have_the_same_attention_and_not_only_tensors_of_the_same_shapes():
    (row,) = (row for row in ROWS if row.option == "--experimental-attention-variant")
    assert callable(row.peers_share)
    none = {"experimental_attention_variant": None, "hybrid_layer_pattern": None, "hybrid_override_pattern": None}
    assert row.peers_share(Namespace(**none)) is None
    for letter, variant, one, another in (
        (
            "G",
            "gated_delta_net",
            {"linear_num_key_heads": 2, "linear_key_head_dim": 8},
            {"linear_num_key_heads": 4, "linear_key_head_dim": 4},
        ),
        ("D", "dsa", {"dsa_indexer_scoring_relu": True}, {"dsa_indexer_scoring_relu": False}),
    ):
        # In a GPT, and by the letter of a hybrid model's pattern.
        for asked in ({"experimental_attention_variant": variant}, {"hybrid_layer_pattern": f"M{letter}-"}):
            said = [row.peers_share(Namespace(**{**none, **asked, **sizes})) for sizes in (one, another)]
            assert said[0] != said[1] and variant in said[0]


def test_every_supported_option_names_a_test_that_exists():
    missing, found = [], 0
    for option, _, verdict in all_verdicts():
        if verdict.status == "supported":
            file, _, name = verdict.tested_by.partition("::")
            path = Path(REPOSITORY, file)
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
            if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                missing.append((option, verdict.tested_by))
            found += 1
    assert missing == [] and found > 90


def test_what_is_accepted_without_a_test_says_why_none_is_named():
    unsaid = {
        (option, feature, verdict.reason)
        for option, feature, verdict in all_verdicts()
        if verdict.status == "accepted" and verdict.reason not in WITHOUT_A_TEST
    }
    assert unsaid == set()


def test_one_option_has_no_test_with_peers():
    untried = {row.option for row in ROWS if row.verdicts["sync-service"] == AS_ANY_JOB}
    assert untried <= {"--ddp-pad-buckets-for-high-nccl-busbw"}  # a toy's padded buckets cannot be saved


def test_what_only_a_gpu_can_run_is_refused_on_cpu():
    for row in ROWS:
        untried = {feature for feature, verdict in row.verdicts.items() if verdict in (ON_A_GPU, PEER_ON_A_GPU)}
        assert not untried or row.verdicts["cpu"].refuses, (row.option, untried)


def test_no_option_has_two_rows():
    options = [row.option for row in ROWS]
    assert len(options) == len(set(options))


def test_no_way_out_leads_to_another_refusal():
    for option, feature, verdict in all_verdicts():
        named = set(re.findall(r"--[a-z0-9-]+", verdict.way_out)) - {option.split()[0]}
        for other in ROWS:
            assert other.option not in named or not other.verdicts[feature].refuses, (option, other.option)


def test_a_feature_that_leaves_the_say_to_another_leaves_it_to_one_that_has_it():
    for option, feature, verdict in all_verdicts():
        if verdict.status == "like another":
            (row,) = (row for row in ROWS if row.option == option)
            assert verdict.feature != feature and row.verdicts[verdict.feature].status != "like another"


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "supported"},
        {"status": "refused", "reason": "z"},
        {"status": "needs a GPU", "way_out": "z"},
        {"status": "refused", "tested_by": "tests/x.py::y", "reason": "z", "way_out": "z"},
        {"status": "accepted"},
        {"status": "like another"},
    ],
)
def test_a_verdict_that_does_not_say_enough_cannot_be_made(wrong):
    with pytest.raises(ValueError, match="table of options: "):
        OptionVerdict(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verdicts": dict.fromkeys([*FEATURES][1:], accepted("z"))},
        {"verdicts": dict.fromkeys([*FEATURES, "gpu"], accepted("z"))},
        {"verdicts": dict.fromkeys(FEATURES, accepted("z").but("--an-option", refused("z")))},
        {"flags": ()},
        {"flags": ("flag",)},
    ],
)
def test_a_row_that_is_not_whole_or_has_unknown_parts_cannot_be_made(wrong):
    verdicts = dict.fromkeys(FEATURES, refused("z"))
    right = {"option": "--flag", "flags": ("--flag",), "asked": bool, "verdicts": verdicts}
    Row(**right)
    with pytest.raises(ValueError, match="--flag"):
        Row(**{**right, **wrong})


def test_an_unknown_feature_or_circumstance_is_an_error():
    with pytest.raises(KeyError):
        refusals(None, "gpu")
    with pytest.raises(KeyError):
        refusals(None, "spes", "--an-option")


def test_every_circumstance_decides_over_some_option():
    used = {(name, each) for row in ROWS for name, verdict in row.verdicts.items() for each in verdict.exceptions}
    assert used == {(name, each) for name, known in CIRCUMSTANCES.items() for each in known}


def test_a_row_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROWS[0].option = "--flag"
    with pytest.raises(TypeError):
        ROWS[0].verdicts["cpu"] = refused("z")


# Flags for every row that may be refused with either feature.
DOUBTFUL = [
    "",
    "--ddp-param-name-patterns-for-fp32-local-accumulation bias",
    "--create-all-gather-group",
    "--nccl-communicator-config-path nccl.yaml",
    "--use-sharp",
    "--high-priority-stream-groups dp",
    "--lazy-mpu-init",
    "--fake-process-group",
    "--freeze-all-layers",
    "--hybrid-layer-pattern M*",
    "--hybrid-override-pattern M*",
    "--init-method-xavier-uniform",
    "--phase-transition-iterations 2",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --position-embedding-type rope",
    "--data-parallel-random-init",
    "--rampup-batch-size 4 4 8",
    "--step-batch-size-schedule 0:4",
    "--decrease-batch-size-if-needed",
    "--num-distributed-optimizer-instances 2",
    "--num-distributed-optimizer-instances 2 --use-distributed-optimizer",
    "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --optimizer muon",
    "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp",
    "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards 2",
    "--hybrid-context-parallel",
    "--use-tp-pp-dp-mapping",
    "--use-nccl-ub",
    "--ddp-average-in-collective",
    "--grad-reduce-in-bf16",
    "--ddp-reduce-scatter-with-fp32-accumulation",
    "--no-load-optim",
    "--finetune",
    "--pretrained-checkpoint folder",
    "--use-checkpoint-args",
    "--optimizer muon",
    "--optimizer dist_muon",
    "--optimizer lion",
    "--optimizer adaptive_muon",
    "--optimizer lion --fp16",
    "--optimizer soap --save folder",
    "--use-precision-aware-optimizer",
    "--optimizer-cpu-offload",
    "--optimizer-cuda-graph",
    "--cuda-graph-impl full_iteration",
    "--overlap-param-gather-with-optimizer-step",
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--fp8-param-gather",
    "--fp4-param-gather",
    "--qk-clip",
    "--qk-clip --use-distributed-optimizer --bf16",
    "--qk-clip --tensor-model-parallel-size 2 --bf16",
    "--qk-clip --hybrid-layer-pattern M* --bf16",
    "--use-torch-fsdp2 --qk-clip --bf16",
    "--mtp-num-layers 1",
    "--iterations-to-skip 3",
    "--result-rejected-tracker-filename rejected.txt",
    "--moe-router-enable-expert-bias",
    "--moe-router-load-balancing-type quantile_balancing",
    "--perform-rl-step",
    "--ckpt-format torch",
    "--ckpt-format torch --async-save",
    "--ckpt-format torch --non-persistent-ckpt-type global",
    "--ckpt-format torch_dcp",
    "--ckpt-format fsdp_dtensor",
    "--ckpt-convert-format torch",
    "--distrib-optim-fully-reshardable-mem-efficient",
    "--ckpt-fully-parallel-load-exchange-algo gather_object",
    "--ckpt-fully-parallel-save-process-group ep_dp",
    "--ckpt-fully-parallel-load-process-group ep_dp",
    "--dist-ckpt-save-pre-mcore-014",
    "--dist-ckpt-strictness raise_all",
    "--dist-ckpt-strictness return_all",
    "--no-save-optim",
    "--override-ckpt-iteration 3",
    "--use-mp-args-from-checkpoint-args",
    "--save-params-interval 3",
    "--save-activations-interval 3",
    "--save-tokens-per-expert-interval 3",
    "--save-wgrads-interval 3",
    "--save-dgrads-interval 3",
    "--use-torch-fsdp2 --check-weight-hash-across-dp-replicas-interval 3",
    "--use-torch-fsdp2 --save-params-interval 3",
    "--use-torch-fsdp2 --save-wgrads-interval 3",
    "--num-distributed-optimizer-instances 2 --save-wgrads-interval 3",
    "--load-main-params-from-ckpt",
    "--non-persistent-save-interval 3",
    "--non-persistent-ckpt-type global",
    "--non-persistent-ckpt-type local",
    "--non-persistent-ckpt-type in_memory",
    "--exit-duration-in-mins 5",
    "--inprocess-restart",
    "--enable-ft-package",
    "--adlr-autoresume",
    "--full-validation",
    "--init-model-with-meta-device",
    "--log-straggler",
    "--log-max-attention-logit",
    "--moe-expert-rank-capacity-factor 1.5",
    "--sft",
    "--sft --pipeline-model-parallel-size 2 --micro-batch-size 2",
    "--dataloader-type external",
    "--phase-transition-iterations 3",
    "--te-precision-config-file precision.yaml",
    "--te-rng-tracker",
    "--distribute-saved-activations",
    "--overlap-moe-expert-parallel-comm",
    "--microbatch-group-size-per-virtual-pipeline-stage 2",
    "--moe-routing-trace-path folder",
    "--logits-load-dir folder",
    "--check-for-spiky-loss",
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
    "--moe-router-load-balancing-type sinkhorn --num-experts 4 --disable-bias-linear",
    "--moe-expert-capacity-factor 1",
    "--num-experts 4 --transformer-impl local",
    "--moe-router-topk 9 --num-experts 4 --disable-bias-linear",
    "--log-interval 0",
    "--eval-interval 0",
    "--make-vocab-size-divisible-by 0",
    "--heterogeneous-layers-config-path layers.json --num-experts 4 --disable-bias-linear",
    f"--heterogeneous-layers-config-path {LINEAR_LAYERS}"
    " --tensor-model-parallel-size 2 --sequence-parallel",
    f"--heterogeneous-layers-config-path {LINEAR_LAYERS} --num-layers 2",
    "--heterogeneous-layers-config-path layers.json --num-virtual-stages-per-pipeline-rank 2"
    " --pipeline-model-parallel-size 2",
    "--hybrid-layer-pattern MG --tensor-model-parallel-size 2",
    "--heterogeneous-layers-config-encoded-json {}",
    "--num-experts 4 --tensor-model-parallel-size 2",
    "--moe-shared-expert-intermediate-size 16 --num-experts 4 --expert-model-parallel-size 2",
    "--hierarchical-context-parallel-sizes 2 2",
    "--num-layers-per-virtual-pipeline-stage 1",
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 2",
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 5"
    " --decoder-first-pipeline-num-layers 1",
    "--decoder-first-pipeline-num-layers 1",
    "--dataloader-type cyclic",
    "--data-path one another",
    "--data-args-path file",
    "--fim-data",
    "--dataloader-inter-document-masking",
    "--window-size 8,8",
    "--transformer-impl transformer_engine --window-size 8,0",
    "--position-embedding-type yarn",
    "--position-embedding-type mrope",
    "--position-embedding-type relative",
    "--padded-vocab-size 259 --tensor-model-parallel-size 2",
    "--mla-down-proj-fusion",
    "--experimental-attention-variant gated_delta_net",
    "--experimental-attention-variant gated_delta_net --mtp-num-layers 1",
    "--experimental-attention-variant gated_delta_net --tensor-model-parallel-size 2",
    "--experimental-attention-variant dsa",
    "--dsa-indexer-topk-freq 2",
    "--moe-single-grouped-weight",
    "--moe-single-grouped-bias",
    "--spec module layers",
    "--ddp-pad-buckets-for-high-nccl-busbw --dist-ckpt-optim-fully-reshardable --overlap-grad-reduce",
    "--dsa-indexer-topk 4",
    "--moe-mlp-glu-interleave-size 8",
    "--moe-shared-expert-glu-interleave-size 8",
    "--openai-gelu",
    "--apply-residual-connection-post-layernorm",
    "--mup-width-mult 2",
    "--qk-l2-norm --transformer-impl local",
    "--rope-scaling-factor 4",
    *NEEDS_A_GPU,
]
PLAIN = [
    "",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16",
    "--optimizer sgd",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --position-embedding-type rope"
    " --untie-embeddings-and-output-weights",
    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable",
    "--async-save --use-persistent-ckpt-worker --dist-ckpt-strictness log_all",
    "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 2",
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 6"
    " --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4",
    "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --num-layers 4",
    "--calculate-per-token-loss --exit-signal-handler",
]


_EVALUATION = ("--eval-interval", "100")
"""Without which Megatron fails, whatever else is asked for."""


def said_of(lines):
    """For each command line: the options of all rows that it asks for, and the refusals of each feature."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.backends.cpu import set_argument_defaults

    on_gpu = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(on_gpu)
    on_cpu = argparse.ArgumentParser(parents=[on_gpu], add_help=False, conflict_handler="resolve", allow_abbrev=False)
    set_argument_defaults(on_cpu)
    results = []
    for line in lines:
        asked, said = {}, {}
        data = [] if line.startswith(("--data-path", "--data-args-path")) else ["--mock-data"]
        for feature in FEATURES:
            args = (on_cpu if feature == "cpu" else on_gpu).parse_args([*_EVALUATION, *line.split(), *data])
            asked[feature] = {row.option for row in ROWS if row.is_in(args) and row.asked(args)}
            said[feature] = refusals(args, feature)
        results.append((asked, said))
    return results


def said_without_einops(lines):
    """The same where Megatron has not found the package that it makes groups of optimizer instances with."""
    from megatron.core import parallel_state

    parallel_state.HAVE_EINOPS = False
    return said_of(lines)


def test_every_refused_row_fires_on_its_option_and_names_it():
    (results,) = run_ranks(said_without_einops, 1, DOUBTFUL)
    plain, _ = results[0]
    missing = {(row.option, name) for row in ROWS for name, verdict in row.verdicts.items() if verdict.refuses}
    for line, (asked, said) in zip(DOUBTFUL[1:], results[1:], strict=True):
        assert any(asked[feature] - plain[feature] for feature in FEATURES), line
        for feature, sentences in said.items():
            refused_by = {row.option for row in ROWS if row.option in asked[feature] and row.verdicts[feature].refuses}
            assert bool(refused_by) == bool(sentences), (line, feature)
            anywhere = any(row.refuses_by_itself(row.verdicts[feature]) for row in ROWS if row.option in refused_by)
            assert all(anywhere or FEATURES[feature] in sentence for sentence in sentences)
            assert all("; " in sentence for sentence in sentences)
            by_name = [line.split()[0] in sentence or "uneven pipeline stages" in sentence for sentence in sentences]
            assert any(by_name) or not sentences, sentences
            missing -= {(option, feature) for option in refused_by}
    # Megatron's own parser refuses zarr before we could.
    assert {option for option, _ in missing} <= {"--ckpt-format zarr"}


def test_what_is_supported_is_not_refused():
    (results,) = run_ranks(said_of, 1, PLAIN)
    for line, (_, said) in zip(PLAIN, results, strict=True):
        assert said == {feature: [] for feature in FEATURES}, line
