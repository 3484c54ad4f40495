# SPDX-License-Identifier: Apache-2.0
"""Lists of strategies and models as the dice have them: training computes what stock Megatron does under home."""

import random

import pytest

from tests.hot_switch.runs import (
    COMMON,
    assert_equal_except_for_rounding,
    full_parameters,
    many_rounds,
    same_weights,
    stock_run,
    tell_padding,
)
from tests.hot_switch.test_training import LLAMA
from tests.support.every_run import one_of_each
from tests.support.presets import MOE, toy_gpt
from tests.support.pretrain import run_pretrain

RANKS = 4
FEW, MANY = 3, 40
BOUNDS = (32, 24, 16, 8, 4)
"""Of buckets. Rows of all of them can be cut in every way that is drawn, except for the last."""
CUTS = [(tp, pp, cp) for tp in (1, 2, 4) for pp in (1, 2, 4) for cp in (1, 2) if tp * pp * cp <= RANKS]


def drawn_strategy(dice: random.Random, experts: bool) -> dict[str, int | str | bool]:
    """Return the fields of a strategy of 4 ranks."""
    tp, pp, cp = dice.choice(CUTS)
    dp = RANKS // (tp * pp * cp)
    drawn: dict[str, int | str | bool] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    if pp == 2:
        drawn["vpp"] = dice.choice((1, 2))
    # Megatron trains experts under tensor parallelism with sequence parallelism only.
    if tp > 1 and (experts or dice.random() < 0.5):
        drawn["sequence_parallel"] = True
    if experts:
        drawn["etp"] = 1
        drawn["ep"] = dice.choice([ep for ep in (1, 2, 4) if (RANKS // pp) % ep == 0])
    drawn["recompute"] = dice.choice(("none", "selective", "full"))
    drawn["micro_batch_size"] = dice.choice((1, 2))
    return drawn


def drawn_list(seed: int) -> tuple[list[dict[str, int | str | bool]], list[int], dict[str, object]]:
    """Return strategies, bucket sizes and the model's options."""
    dice = random.Random(seed)
    experts = dice.random() < 0.4
    strategies = [drawn_strategy(dice, experts) for _ in range(dice.randint(2, 4))]
    sizes = sorted(dice.sample(BOUNDS[1:-1], len(strategies) - 1), reverse=True)
    options: dict[str, object] = {"num_layers": 4, "train_iters": 4, "use_distributed_optimizer": dice.random() < 0.7}
    if dice.random() < 0.6:
        options |= LLAMA
        if any(strategy["tp"] == 4 for strategy in strategies):
            options["num_query_groups"] = 4
    if experts:
        options |= {**MOE, "moe_aux_loss_coeff": 0.0, "disable_bias_linear": True}
        # Stock Megatron's stages in front do not know where rows have padding.
        if strategies[0]["pp"] == 1:
            options["moe_z_loss_coeff"] = 0.1
    return strategies, [BOUNDS[0], *sizes, 0], options


@pytest.mark.parametrize(
    "seed",
    [
        *one_of_each(range(FEW), {0}),
        *[pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(FEW, MANY)],
    ],
)
def test_a_drawn_list_trains_as_home_does_alone(tmp_path, seed):
    strategies, sizes, options = drawn_list(seed)
    lines = [", ".join(f"{key}: {str(value).lower()}" for key, value in drawn.items()) for drawn in strategies]
    text = f"bucket_sizes: {sizes}\nstrategies:\n" + "".join(f"  - {{{line}}}\n" for line in lines)
    print(text, options)
    (tmp_path / "strategies.yaml").write_text(text)
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(tmp_path / "strategies.yaml"))
    hot = run_pretrain(command, RANKS, probe=full_parameters, before=(many_rounds, same_weights))
    home = strategies[0]
    # Whole rows in place of parts of them.
    layout = f"{home['dp'] * home['cp']},{home['tp']},{home['pp']}"
    if home.get("vpp", 1) > 1:
        options["num_virtual_stages_per_pipeline_rank"] = home["vpp"]
    if "ep" in home:
        options |= {"expert_model_parallel_size": home["ep"], "expert_tensor_parallel_size": 1}
    options["sequence_parallel"] = home.get("sequence_parallel", False)
    before = (same_weights, tell_padding) if "moe_z_loss_coeff" in options else (same_weights,)
    assert_equal_except_for_rounding(hot, stock_run(layout, *before, **options))
