# SPDX-License-Identifier: Apache-2.0
"""Muon and its family: home steps on the gradients of all strategies as stock Megatron does on its own."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.hot_switch.runs import LLAMA, arguments, assert_equal_except_for_rounding, hot_run, losses, stock_run
from tests.support.every_run import one_of_each
from tests.support.presets import MOE, PRECISIONS
from tests.support.pretrain import run_failing_pretrain, run_pretrain

EXACT = {"muon_fp32_matmul_prec": "high", "train_iters": 8}
"""Muon's default multiplies in bf16 where the processor can, and is then as far from itself on other sums."""
LAYER_WISE = {**PRECISIONS["bf16-distopt-overlap"], "optimizer": "muon", "train_iters": 6}
"""Megatron's layer-wise optimizer, which needs bf16."""

AT_ONCE = {"overlap_grad_reduce": None, "overlap_param_gather": None}
EXPERTS = {**MOE, "moe_aux_loss_coeff": 0.0, "expert_model_parallel_size": 2, "disable_bias_linear": True}


def buckets_of(strategies):
    """Bounds in each of which there are documents."""
    return [32, 16, 8, 0] if len(strategies) > 2 else [32, 12, 0]


@pytest.mark.parametrize(
    ("strategies", "options"),
    one_of_each(
        [
            (["1,2,2", "4,1,1", "2,1,2"], {"optimizer": "muon", "muon_tp_mode": "duplicated", "muon_nesterov": True}),
            # A key's bias has no gradient but rounding, and Lion takes its sign.
            (["2,1,1", "1,2,1"], {"optimizer": "muon", "muon_scalar_optimizer": "lion", "disable_bias_linear": True}),
            (["1,1,2", "2,1,1"], {"optimizer": "lion", "lr": 3e-4}),
        ],
        {0},
    ),
    ids=["muon", "muon and lion", "lion"],
)
def test_hot_equals_static(strategies, options):
    hot = hot_run(strategies, buckets_of(strategies), **EXACT, **options)
    assert_equal_except_for_rounding(hot, stock_run(strategies[0], **EXACT, **options))


@pytest.mark.parametrize(
    ("strategies", "options"),
    one_of_each(
        [
            (["2,2,1", "4,1,1", "1,2,2"], {**LLAMA, "sequence_parallel": True}),
            (["2,1,1", "1,1,2"], {**AT_ONCE, "optimizer": "dist_muon", "use_distributed_optimizer": None}),
            (["2,1,1", "1,1,2"], {**AT_ONCE, **EXPERTS}),
        ],
        {1},
    ),
    ids=["gathered late", "dist_muon", "experts"],
)
def test_layer_wise_it_stays_as_near_to_stock_as_rounding_allows(strategies, options):
    options = {**LAYER_WISE, **options}
    hot = hot_run(strategies, buckets_of(strategies), **options)
    stock = stock_run(strategies[0], **options, accumulate_allreduce_grads_in_fp32=True)
    assert losses(hot) == pytest.approx(losses(stock), abs=0.02)
    assert hot[0].grad_norms == pytest.approx(stock[0].grad_norms, rel=0.02)
    assert losses(stock)[-1] < losses(stock)[0] - 0.03


def keep_gradients(folder):
    """Instrument: write down what each step of the optimizer finds, rank by rank."""
    on_every_step(partial(_keep, Path(folder)))


def give_gradients(folder):
    """Instrument: let each step of the optimizer find what another run wrote down."""
    on_every_step(partial(_give, Path(folder)))


def on_every_step(act):
    """Call `act(number, gradients by chunk and name)` before the optimizer's steps."""
    from megatron.training import training

    build = training.setup_model_and_optimizer

    def built(*args, **kwargs):
        model, optimizer, *rest = build(*args, **kwargs)
        step, count = optimizer.step, iter(range(100))

        def stepped():
            trained = {
                f"{number}.{name}": value.main_grad
                for number, chunk in enumerate(model)
                for name, value in chunk.named_parameters()
            }
            act(next(count), trained)
            return step()

        optimizer.step = stepped
        return model, optimizer, *rest

    training.setup_model_and_optimizer = built


def _file(folder, number):
    return folder / f"rank{os.environ['RANK']}-step{number}.pt"


def _keep(folder, number, gradients):
    import torch

    torch.save({name: value.clone() for name, value in gradients.items()}, _file(folder, number))


def _give(folder, number, gradients):
    import torch

    kept = torch.load(_file(folder, number))
    assert kept.keys() == gradients.keys()
    for name, value in gradients.items():
        value.copy_(kept[name])


TENSOR_RANKS = ["1,2,1", "2,1,1", "1,1,2"]
REPLICAS = ["2,1,1", "1,2,1"]


@pytest.mark.parametrize(
    ("strategies", "options"),
    one_of_each(
        [
            (TENSOR_RANKS, {"optimizer": "muon", "muon_tp_mode": "blockwise"}),
            (TENSOR_RANKS, {"optimizer": "muon", "muon_tp_mode": "duplicated"}),
            (TENSOR_RANKS, {"optimizer": "muon", "muon_tp_mode": "distributed", "bf16": True}),
            (TENSOR_RANKS, {"optimizer": "soap"}),
            (REPLICAS, LAYER_WISE),
        ],
        {2, 4},
    ),
    ids=["blockwise", "duplicated", "distributed", "soap", "layer-wise"],
)
def test_on_the_same_gradients_homes_steps_are_stocks_bit_for_bit(tmp_path, strategies, options):
    options = {**options, "train_iters": 3}
    command = arguments(strategies, buckets_of(strategies), **options)
    hot = run_pretrain(command, 2, before=partial(keep_gradients, os.fspath(tmp_path)))
    stock = stock_run(strategies[0], partial(give_gradients, os.fspath(tmp_path)), **options)
    for ours, theirs in zip(hot, stock, strict=True):
        assert ours.grad_norms == theirs.grad_norms
        assert ours.parameters == theirs.parameters
        assert ours.optimizer == theirs.optimizer
    assert len(set(hot[0].grad_norms)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adaptive_muon"}, "--optimizer adaptive_muon is not supported: it lacks in"),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, "layer-wise optimizer, which it takes then, cannot"),
        ({"optimizer": "lion", "fp16": True}, "with --fp16 is not supported: Megatron has no loss"),
        ({"optimizer": "soap", "save": "folder", "save_interval": 1}, "Megatron cannot write its state"),
    ],
    ids=["adaptive", "layer-wise in fp32", "fp16", "soap's state"],
)
def test_what_megatron_cannot_do_with_them_is_refused(options, said):
    (exit_, *_) = run_failing_pretrain(arguments(REPLICAS, [32, 12, 0], **options), 2)
    assert said in exit_.stderr and "Traceback" not in exit_.stderr
