# SPDX-License-Identifier: Apache-2.0
"""docs/from-atorch.md: every block of code there runs."""

import re
import sys

import torch
import torch.distributed as dist

from tests.support.distributed import REPOSITORY, run_ranks

TEXT = (REPOSITORY / "docs" / "from-atorch.md").read_text(encoding="utf-8")


def block(heading):
    """Return the code under a heading."""
    section = TEXT[TEXT.index(f"\n## {heading}") :]
    (code,) = re.findall(r"^```python\n(.*?)^```", section.split("\n## ")[1], re.MULTILINE | re.DOTALL)
    return compile(code, heading, "exec")


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
    return optimizer.averager.step, optimizer.averager.engine.rounds


def sharded(folder):
    dist.init_process_group("gloo")
    names = {"device": "cpu", "workers": 2, "shards": 2, "model": Layers(), "save_dir": folder}
    exec(block("Sharded models (FSDP)"), names)
    done = steps(names["model"], names["optimizer"], 11)
    exec(block("Their checkpoints"), names)
    return done, steps(names["model"], names["optimizer"], 9)


def test_sharded_models_make_rounds_and_their_state_is_saved_and_loaded(tmp_path):
    assert run_ranks(sharded, 4, str(tmp_path)) == [((11, 1), (20, 2))] * 4


def whole():
    dist.init_process_group("gloo")
    names = {"warmup_steps": 2, "model": Layers()}
    exec(block("Whole models (DDP)"), names)
    return steps(names["model"], names["optimizer"], 12)


def test_whole_models_make_rounds():
    assert run_ranks(whole, 2) == [(12, 1)] * 2


def in_megatron():
    sys.argv = ["pretrain_gpt.py", "--use-local-sgd", "--local-sgd-sync-interval", "32", "--local-sgd-warmup-steps=256"]
    names = {}
    exec(block("Megatron"), names)
    args = names["args"]
    return args.use_local_sgd, args.local_sgd_sync_interval, args.local_sgd_warmup_steps


def test_megatron_takes_the_options():
    assert run_ranks(in_megatron, 1) == [(True, 32, 256)]
