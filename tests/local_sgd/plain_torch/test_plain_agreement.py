# SPDX-License-Identifier: Apache-2.0
"""Workers without Megatron that were not told or given the same are refused together, and none is left waiting."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import pairs
from tests.local_sgd.plain_runs import model, said_by, train, wrapped
from tests.support.distributed import run_ranks
from tests.support.packages import write_package

TIMEOUT = 60.0

# What all workers have, what worker 1 of 3 has instead, and what all of them say. An odd worker of an earlier release
# was waited for forever (another interval, fragments, penalty), or trained on by itself (all others).
SETTINGS = {
    "interval": ({"interval": 4}, {"interval": 5}, "local_sgd_sync_interval is 4 on workers 0, 2 and 5 on worker 1"),
    "outer rate": (
        {"outer": {"outer_optimizer_lr": 0.7}},
        {"outer": {"outer_optimizer_lr": 0.5}},
        "outer_optimizer_lr is 0.7 on workers 0, 2 and 0.5 on worker 1",
    ),
    "outer rate unless given": (
        {},
        {"outer": {"outer_optimizer_lr": 0.5}},
        "outer_optimizer_lr is 0.7 on workers 0, 2 and 0.5 on worker 1",
    ),
    "outer momentum": (
        {},
        {"outer": {"outer_optimizer_momentum": 0.5}},
        "outer_optimizer_momentum is 0.9 on workers 0, 2 and 0.5 on worker 1",
    ),
    "outer arguments": (
        {"outer": {"outer_optim_class": torch.optim.Adam, "outer_optim_kwargs": {"lr": 0.1, "betas": (0.9, 0.99)}}},
        {"outer": {"outer_optim_class": "torch.optim.Adam", "outer_optim_kwargs": {"lr": 0.1, "betas": (0.9, 0.9)}}},
        "outer_optim_kwargs is {betas: [0.9, 0.99], lr: 0.1} on workers 0, 2 and {betas: [0.9, 0.9], lr: 0.1} on",
    ),
    "codec": ({"codec": "bf16"}, {"codec": "fp16"}, "codec is 'bf16' on workers 0, 2 and 'fp16' on worker 1"),
    "no codec": ({"codec": "bf16"}, {}, "codec is 'bf16' on workers 0, 2 and not given on worker 1"),
    "fragments": (
        {"interval": 4, "streaming": {"fragments": 2}},
        {"interval": 4, "streaming": {"fragments": 3}},
        "fragments is 2 on workers 0, 2 and 3 on worker 1",
    ),
    "delay": (
        {"interval": 4, "streaming": {"sync_delay": 1}},
        {"interval": 4, "streaming": {"sync_delay": 2}},
        "sync_delay is 1 on workers 0, 2 and 2 on worker 1",
    ),
    "reducer": (
        {"gta": {"reducer": "gta", "consensus_method": "sum"}},
        {"gta": {"reducer": "gta", "consensus_method": "count"}},
        "consensus_method is 'sum' on workers 0, 2 and 'count' on worker 1",
    ),
    "penalty": ({"clip_pseudo_grad": 1.0}, {}, "clip_pseudo_grad is 1 on workers 0, 2 and not given on worker 1"),
    "warm-up": ({"warmup": 3}, {"warmup": 4}, "local_sgd_warmup_steps is 3 on workers 0, 2 and 4 on worker 1"),
    "clock": ({"use_async": True}, {}, "use_async is True on workers 0, 2 and False on worker 1"),
    "window": (
        {"use_async": True, "local_sgd_sync_time": 5.0},
        {"use_async": True, "local_sgd_sync_time": 6.0},
        "local_sgd_sync_time is 5 on workers 0, 2 and 6 on worker 1",
    ),
    "end": (
        {"use_async": True, "total": 100},
        {"use_async": True, "total": 90},
        "total_global_steps is 100 on workers 0, 2 and 90 on worker 1",
    ),
    "forward": ({}, {"sync_in_forward": True}, "sync_in_forward is False on workers 0, 2 and True on worker 1"),
    "buffers": ({}, {"buffers": "own"}, "buffers is 'average' on workers 0, 2 and 'own' on worker 1"),
    "bad value": ({"interval": 4}, {"interval": 0}, "local_sgd_sync_interval is 0; it must be at least 1 step"),
}


def with_odd_worker():
    """Return by what is odd what is said where worker 1 has other settings than all others."""
    dist.init_process_group("gloo")
    module, rank = model(), dist.get_rank()

    def wrap(fields):
        wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, **fields)

    return {
        what: said_by(lambda fields=odd if rank == 1 else usual: wrap(fields))
        for what, (usual, odd, _) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def refusals():
    """What every worker says to every odd setting of worker 1."""
    return run_ranks(with_odd_worker, 3, timeout=TIMEOUT)


@pytest.mark.parametrize("what", SETTINGS)
def test_a_worker_with_other_settings_is_refused_on_all_workers_with_the_field_and_both_values(what, refusals):
    for number, said in enumerate(each[what] for each in refusals):
        assert said.startswith("local SGD: ") and SETTINGS[what][-1] in said
        assert "\n" not in said
        assert ("worker 1" in said) == (what != "bad value" or number != 1)


def several_differences():
    dist.init_process_group("gloo")
    module, rank = model(), dist.get_rank()
    fields = {"interval": 4 + rank, "codec": ["bf16", None, "int8"][rank]}
    return said_by(lambda: wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, **fields))


def test_all_differences_are_said_at_once():
    for said in run_ranks(several_differences, 3, timeout=TIMEOUT):
        assert said.splitlines() == [
            "local SGD: 2 problems",
            "  1. local_sgd_sync_interval is 4 on worker 0, 5 on worker 1 and 6 on worker 2; give all of them the same",
            "  2. codec is 'bf16' on worker 0, not given on worker 1 and 'int8' on worker 2; give all of them the same",
        ]


def odd_rank_of_a_worker(what):
    """Return what is said where the last of two workers' four ranks has other settings than all others."""
    groups = pairs()
    rank = dist.get_rank()
    value = torch.nn.Parameter(torch.zeros(4))
    fields = {"interval": 4}
    if rank == 3:
        fields = {"interval": 5} if what == "settings" else {"interval": 0}
    return said_by(lambda: wrapped(torch.optim.SGD([value], lr=1.0), groups=groups, **fields))


def test_a_rank_of_a_worker_with_other_settings_is_refused_on_all_ranks_of_all_workers():
    for said in run_ranks(odd_rank_of_a_worker, 4, "settings", timeout=TIMEOUT):
        assert said == (
            "local SGD: local_sgd_sync_interval is 4 on rank 0 of worker 0, rank 1 of worker 0, rank 0 of worker 1 and "
            "5 on rank 1 of worker 1; give all of them the same"
        )


def test_a_bad_value_of_a_rank_of_a_worker_is_refused_on_all_ranks_of_all_workers():
    *others, own = run_ranks(odd_rank_of_a_worker, 4, "value", timeout=TIMEOUT)
    assert own == "local SGD: local_sgd_sync_interval is 0; it must be at least 1 step"
    assert others == [own.replace("SGD: ", "SGD: rank 1 of worker 1: ")] * 3


def logged_by_the_first_rank(file):
    dist.init_process_group("gloo")
    module, rank = model(), dist.get_rank()
    fields = {"interval": 2, "local_sgd_round_log": file} if rank == 0 else {"interval": 2}
    train(module, wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, **fields), 5, rank)
    return torch.cat([value.detach().reshape(-1) for value in module.parameters()]).sum().item()


def test_the_file_of_rounds_may_be_given_to_the_first_rank_alone(tmp_path):
    from megatron_ext.local_sgd.reporting.round_log import read_rounds

    run_ranks(logged_by_the_first_rank, 3, str(tmp_path / "rounds.jsonl"), timeout=TIMEOUT)
    assert [entry["cosine"] is None for entry in read_rounds(tmp_path / "rounds.jsonl")] == [True, False]


def unequal_models():
    """Return by what is odd about worker 1's model what all say."""
    dist.init_process_group("gloo")
    odd = dist.get_rank() == 1
    said = {}
    for what in MODELS:
        module = torch.nn.Sequential(model(), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        module[2].requires_grad_(False)
        trained = [value for value in module.parameters() if value.requires_grad]
        if odd and what == "dtype":
            module[0].bfloat16()
        if odd and what == "gradients":
            module[2].bias.requires_grad_(True)
        if odd and what == "frozen value":
            module[2].weight.data[0, 0] += 1
        if odd and what == "buffer":
            module[1].running_mean[1] = 0.5
        if odd and what == "shape of a buffer":
            module[1].running_mean = torch.zeros(4)
        if odd and what == "no buffer":
            module[1].num_batches_tracked = None
        if odd and what == "module":
            said[what] = said_by(lambda t=trained: wrapped(torch.optim.SGD(t, lr=0.1)))
        else:
            said[what] = said_by(lambda t=trained, m=module: wrapped(torch.optim.SGD(t, lr=0.1), m))
    return said


MODELS = {
    "dtype": "parameter 0.0.weight is torch.bfloat16; local SGD averages fp32 parameters",
    "gradients": "requires_grad of parameter 2.bias is False on workers 0, 2 and True on worker 1; train the same ones",
    "frozen value": "parameter 2.weight, which is not trained, has other values on worker 1 than on worker 0; load the",
    "buffer": "buffer 1.running_mean has other values on worker 1 than on worker 0; load the same weights on all",
    "shape of a buffer": (
        "buffer 1.running_mean is torch.float32 of shape [3] on workers 0, 2 and torch.float32 of shape [4] on worker 1"
    ),
    "no buffer": (
        "buffer 1.num_batches_tracked is torch.int64 of shape [] on workers 0, 2 and missing on worker 1; build the"
    ),
    "module": "the workers' parameters differ: 0.0.weight of shape [16, 8] on worker 0 is parameter0 of shape [16, 8]",
}


def test_a_worker_with_another_model_is_refused_on_all_workers_with_what_differs():
    for said in run_ranks(unequal_models, 3, timeout=TIMEOUT):
        for what, expected in MODELS.items():
            assert expected in said[what], what
            assert "worker 1" in said[what] or what == "dtype"


def other_layers_inside():
    """Return what is said where the second rank of every worker has one layer more than the first."""
    groups = pairs()
    torch.manual_seed(0)
    module = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(1 + dist.get_rank() % 2))
    return said_by(lambda: wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, groups=groups))


def mixed_groups():
    """Return what is said where the second ranks count the workers the other way round."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    inside = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    value = torch.nn.Parameter(torch.zeros(4))
    return said_by(lambda: wrapped(torch.optim.SGD([value], lr=1.0), groups=(across, inside)))


def test_groups_that_count_workers_in_different_orders_are_refused():
    for said in run_ranks(mixed_groups, 4, timeout=TIMEOUT):
        assert "by their process_group they would be [" in said


def test_ranks_of_a_worker_need_the_same_layers():
    for said in run_ranks(other_layers_inside, 4, timeout=TIMEOUT):
        assert "the ranks of worker 0 have parameters of other layers: 0, 1 on rank 1, 0 on rank 0; all ranks" in said


def with_another_version(folder, versions):
    """Return what ranks are told of which the second one has another version of a package."""
    sys.path.insert(0, f"{folder}/{versions[int(os.environ['RANK'])]}")
    dist.init_process_group("gloo")
    return said_by(lambda: wrapped(torch.optim.SGD(model().parameters(), lr=0.1), codec="their-cast"))


def test_other_versions_of_a_packages_codec_are_refused_on_all_ranks(tmp_path):
    code = "from megatron_ext.outer.codecs.cast import Bf16Codec\n\nclass Own(Bf16Codec):\n    name = 'their-cast'\n"
    for version in ("1.0", "2.0"):
        (tmp_path / version).mkdir()
        write_package(tmp_path / version, "codecs", "their_cast", code, "their_cast:Own", "their-cast", version)
    for said in run_ranks(with_another_version, 2, str(tmp_path), ["1.0", "2.0"]):
        assert "the package of codec is their_cast 1.0 on worker 0 and their_cast 2.0 on worker 1; give all" in said
