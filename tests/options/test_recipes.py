# SPDX-License-Identifier: Apache-2.0
"""Command lines of models that everybody knows, through the validation of every feature."""

import math
import re

import pytest

from tests.options.recipes import RECIPES
from tests.support.distributed import run_ranks
from tests.support.presets import Options, command_line

LOCAL_SGD: Options = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 64}
PEER: Options = {
    "sync_service": "127.0.0.1:50051",
    "sync_service_run": "r",
    "sync_service_peer": "a",
    "sync_service_peers": 4,
    "sync_service_index": 0,
    "sync_service_interval": 100,
}

# Attention by document has the ordinary softmax; Transformer Engine's windows of documents, and FP8 with switches, have
# not run on a GPU.
OF_HOT_SWITCHING = {"gpt-oss-20b": {"--softmax-type", "--window-size"}, "llama3-8b-fp8": {"--fp8-format"}}
REFUSED = {"local SGD": {}, "sync service": {}, "SPES": {}, "hot switching": OF_HOT_SWITCHING}
"""By feature and recipe."""


def flags_of(feature: str, recipe: Options) -> Options | None:
    """Return our options for a recipe; None where the feature has no meaning for the model."""
    if feature == "local SGD":
        return LOCAL_SGD
    if feature == "sync service":
        return PEER
    if feature == "SPES":
        if "num_experts" not in recipe:
            return None
        own = int(str(recipe["num_experts"])) // 4
        spes = {"using_spes": True, "spes_num_train_experts_per_node": own, "spes_expert_assignment": "interleaved"}
        return {**PEER, **spes}
    dp, tp, pp, _ = home_of(recipe)
    guest = (dp * 2, tp // 2, pp) if tp > 1 else (dp * 2, tp, pp // 2) if pp > 1 else (dp // 2, tp * 2, pp)
    length = int(str(recipe["seq_length"]))
    strategies = [",".join(map(str, each)) for each in ((dp, tp, pp), guest)]
    return {"hot_switch_strategies": strategies, "hot_switch_bucket_sizes": [length, length // 2, 0]}


def home_of(recipe: Options) -> tuple[int, int, int, int]:
    """Return the (DP, TP, PP, CP) of a recipe's smallest job."""
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    tp, pp, cp, ep = (int(str(recipe.get(f"{name}_parallel_size", 1))) for name in sizes)
    return math.lcm(tp * cp, ep) // (tp * cp), tp, pp, cp


def refusals(cases: dict[str, tuple[list[str], int]]) -> dict[str, list[str]]:
    """Return what validation says of each command line, none of which is started."""
    import os
    import sys

    from megatron_ext import patch_megatron
    from megatron_ext.hooks import hooks

    patch_megatron(backend="cuda")
    from megatron.training import arguments

    found = {}
    for name, (words, ranks) in cases.items():
        os.environ["WORLD_SIZE"] = str(ranks)
        sys.argv = ["pretrain_gpt.py", *words]
        args = arguments.parse_args()
        for feature in hooks.features:
            feature.complete_arguments(args)
        found[name] = [problem for feature in hooks.features for problem in feature.validate(args)]
    return found


@pytest.mark.parametrize("feature", REFUSED)
def test_what_is_refused_of_recipes_is_what_has_a_reason(feature: str):
    cases = {}
    for name, recipe in RECIPES.items():
        flags = flags_of(feature, recipe)
        if flags is not None:
            dp, tp, pp, cp = home_of(recipe)
            ranks = dp * tp * pp * cp * (1 if feature == "hot switching" else 4)
            cases[name] = (command_line({**recipe, **flags}), ranks)
    (found,) = run_ranks(refusals, 1, cases)
    named = {name: {re.findall(r"--[a-z0-9-]+", problem)[0] for problem in said} for name, said in found.items()}
    assert {name: flags for name, flags in named.items() if flags} == REFUSED[feature]
