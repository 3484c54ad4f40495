# SPDX-License-Identifier: Apache-2.0
"""Layers for Megatron's --spec: they train in every layout, and the features know their weights."""

import shlex

import pytest

from megatron_ext.convert.from_hf import from_hf
from tests.convert import models
from tests.support.pretrain import run_pretrain

TRAINING = shlex.split(
    "--micro-batch-size 1 --global-batch-size 4 --seq-length 20 --train-iters 3 --lr 1e-2 --min-lr 1e-2 "
    "--optimizer sgd --transformer-impl local --no-gradient-accumulation-fusion --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 249 --eval-iters 0 --eval-interval 10 --attention-dropout 0 "
    "--hidden-dropout 0 --no-load-optim --no-load-rng --finetune --moe-aux-loss-coeff 0"
)
CUT = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
WORKERS = shlex.split("--use-local-sgd --local-sgd-workers 2 --local-sgd-sync-interval 3")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command line of a model whose heads are normalised all at once, with its weights."""
    folder = tmp_path_factory.mktemp("olmoe")
    made = from_hf(models.save("olmoe", folder / "model"), folder / "checkpoint")
    return [*made.flags, "--load", str(made.folder), *TRAINING]


def test_norms_over_heads_train_over_tensor_ranks_as_on_one(start: list[str]):
    whole, cut = run_pretrain(start, 1), run_pretrain([*start, *CUT], 2)
    assert len(set(whole[0].losses)) == 3
    assert cut[0].losses == pytest.approx(whole[0].losses, abs=1e-5)
    # A part of a gradient that stays on its rank, or is summed once more, shows here.
    assert cut[0].grad_norms == pytest.approx(whole[0].grad_norms, rel=1e-4)


def test_workers_of_tensor_ranks_meet_with_them(start: list[str]):
    ranks = run_pretrain([*start, *CUT, *WORKERS], 4)
    # Ranks of one tensor-parallel place have the same weights after the round, and trained apart before.
    assert ranks[0].parameters == ranks[2].parameters and ranks[1].parameters == ranks[3].parameters
    assert ranks[0].losses != ranks[2].losses and ranks[0].parameters != ranks[1].parameters
    norms = [name for name in ranks[0].parameters[0] if "q_layernorm" in name]
    assert norms and all(ranks[0].parameters[0][name] == ranks[1].parameters[0][name] for name in norms)
