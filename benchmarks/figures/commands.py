# SPDX-License-Identifier: Apache-2.0
"""The commands that make the figures of README and docs; a new one is a row here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["BY_NAME", "COMMANDS", "LACKING", "Command"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command whose output is quoted."""

    name: str
    """By which pages and `--only` call it."""

    line: str
    """For a shell, in the repository's folder."""

    minutes: float
    """It takes about as long on two cores, set-up not counted."""

    needs: tuple[str, ...] = ()
    """Keys of `LACKING`: what not every machine has."""

    resumes: str = ""
    """Folder from which its jobs would resume, and train nothing; it is removed before."""

    @property
    def writes_json(self) -> bool:
        """Whether it takes `--json FILE`; of others, what they print is kept."""
        return self.line.startswith("python -m benchmarks.")


def _each(command: str, *, seeds: Iterable[int], then: str) -> str:
    """Return the line that makes a run with every seed."""
    return " && ".join(f"{command} --seed {seed} {then}" for seed in seeds)


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


LACKING: Mapping[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() != 0,
    "iproute2": lambda: shutil.which("tc") is None or shutil.which("ip") is None,
    "a GPU": lambda: not _gpu(),
    # Whether an index has atorch 0.2.5 shows when it is installed.
    "a package index": lambda: False,
}
"""What a command may need, with what says that this machine lacks it."""

_TOY = "BACKEND=cpu TRAIN_ITERS=80 DATA_PATH=outputs/tutorial/corpus"
_TOY_SCRIPT = "examples/local_sgd/train_gpt3_diloco_single_node.sh"
_CORPUS = "megatron-ext data prepare --stdlib --output-prefix outputs/tutorial/corpus --reuse > /dev/null"
_CHAOS = "python -m tests.chaos"

COMMANDS = (
    Command(name="step_overhead", line="python -m benchmarks.step_overhead", minutes=6),
    Command(name="outer_sync", line="python -m benchmarks.outer_sync", minutes=4),
    Command(name="overlapped_step", line="python -m benchmarks.overlapped_step", minutes=1),
    Command(name="vs_atorch", line="python -m benchmarks.vs_atorch", minutes=6, needs=("a package index",)),
    Command(name="straggler", line="python -m benchmarks.straggler", minutes=3),
    Command(
        name="straggler_in_megatron",
        line="python -m benchmarks.straggler_in_megatron --step-seconds 1 --interval 8",
        minutes=12,
    ),
    Command(
        name="simulated",
        line="python -m benchmarks.simulated --repeats 3",
        minutes=12,
        needs=("root", "iproute2"),
    ),
    Command(
        name="simulated_far",
        line="python -m benchmarks.simulated --repeats 3 --latency-ms 50 "
        "--settings 'service, H 20' 'service, H 20, int8'",
        minutes=5,
        needs=("root", "iproute2"),
    ),
    Command(name="diloco_bandwidth", line="python -m benchmarks.diloco_bandwidth", minutes=2),
    Command(name="switch_plan", line="python -m benchmarks.switch_plan", minutes=1),
    Command(name="switch", line="python -m benchmarks.switch", minutes=3),
    Command(name="switch_sizes", line="python -m benchmarks.switch_sizes", minutes=1),
    Command(name="hot_switch_estimate", line="python -m benchmarks.hot_switch_estimate", minutes=3),
    Command(name="hot_switch_suggested", line="python -m benchmarks.hot_switch_estimate --suggest", minutes=3),
    Command(name="hot_switch_convergence", line="python -m benchmarks.hot_switch_convergence", minutes=60),
    Command(name="messages", line="python -m benchmarks.messages", minutes=0.5),
    Command(name="spes_round", line="python -m benchmarks.spes_round", minutes=8),
    Command(
        name="spes_round_63m",
        line="python -m benchmarks.spes_round --parts rounds --peers 4 --millions 63 --rounds 4",
        minutes=2,
    ),
    Command(
        name="spes_round_250m",
        line="python -m benchmarks.spes_round --parts rounds --peers 4 --millions 250 --rounds 2",
        minutes=4,
    ),
    Command(
        name="spes_round_bf16",
        line="python -m benchmarks.spes_round --parts rounds --peers 4 --codec bf16",
        minutes=2,
    ),
    Command(
        name="spes_round_bf16_63m",
        line="python -m benchmarks.spes_round --parts rounds --peers 4 --codec bf16 --millions 63",
        minutes=2,
    ),
    Command(name="server_load", line="python -m benchmarks.server_load", minutes=5),
    Command(name="server_load_two", line="python -m benchmarks.server_load --servers 2 --peers 64 256", minutes=1),
    Command(name="convergence", line="python -m benchmarks.convergence", minutes=100),
    Command(
        name="convergence_2048",
        line="python -m benchmarks.convergence --iterations 2048 --evaluation-interval 368 "
        "--methods synchronous edit_h64_few --noise-seeds --output outputs/convergence_2048",
        minutes=80,
    ),
    Command(
        name="convergence_noise",
        line="python -m benchmarks.convergence --methods diloco_h16 edit_h16 edit_relative_h16 --seeds 1 2 "
        "--noise-seeds 1 2 --evaluation-interval 16 --output outputs/convergence_noise",
        minutes=50,
    ),
    Command(name="muloco_convergence", line="python -m benchmarks.muloco_convergence", minutes=30),
    Command(name="outer_schedules", line="python -m benchmarks.outer_methods schedules", minutes=15),
    Command(name="one_worker", line="python -m benchmarks.outer_methods one-worker", minutes=14),
    Command(name="sparse_messages", line="python -m benchmarks.outer_methods sparse", minutes=6),
    Command(name="token_weights", line="python -m benchmarks.token_weights --seeds 1 2 3 4 5", minutes=2),
    Command(name="spes_method_peers", line="python -m benchmarks.spes_method peers", minutes=4),
    Command(name="spes_method_price", line="python -m benchmarks.spes_method price", minutes=30),
    Command(name="spes_method_released", line="python -m benchmarks.spes_method released", minutes=6),
    Command(
        name="spes_convergence",
        line="python -m benchmarks.spes_convergence --methods centralized fedavg_h50 spes_h50",
        minutes=60,
    ),
    Command(
        name="spes_convergence_2000",
        line="python -m benchmarks.spes_convergence --methods centralized spes_h50 --seeds 1 --iterations 2000 "
        "--output outputs/spes/convergence_2000",
        minutes=60,
    ),
    Command(
        name="spes_convergence_started",
        line="python -m benchmarks.spes_convergence --iterations 2000 --seeds 2 --output outputs/spes/convergence_2000 "
        "--methods centralized spes_h50_started spes_h50_two_owners",
        minutes=90,
    ),
    Command(
        name="spes_convergence_owners",
        line="python -m benchmarks.spes_convergence --iterations 1000 --sequences 32 "
        "--output outputs/spes/convergence_32 --methods centralized spes_h50_two_owners spes_h50_three_owners",
        minutes=240,
    ),
    Command(name="quickstart", line="examples/quickstart.sh", minutes=6),
    Command(name="spes_quickstart", line="BACKEND=cpu examples/spes/quickstart.sh", minutes=4),
    Command(name="hot_switch_quickstart", line="BACKEND=cpu examples/hot_switch/quickstart.sh", minutes=5),
    Command(
        name="tutorial_spes",
        line="BACKEND=cpu examples/spes/quickstart.sh --iterations 100 --output outputs/tutorial/spes",
        minutes=2,
    ),
    Command(
        name="tutorial_hot_switch",
        line="BACKEND=cpu examples/hot_switch/quickstart.sh --iterations 20 --output outputs/tutorial/hot_switch",
        minutes=4,
    ),
    Command(
        name="tutorial_diloco",
        line=f"{_CORPUS} && {_TOY} {_TOY_SCRIPT} outputs/tutorial/diloco "
        "&& megatron-ext local-sgd report outputs/tutorial/diloco --last 5 "
        f"&& {_TOY.replace('80', '96')} EXTRA_ARGS=--override-opt-param-scheduler "
        f"{_TOY_SCRIPT} outputs/tutorial/diloco",
        minutes=4,
        resumes="outputs/tutorial/diloco",
    ),
    Command(
        name="tutorial_edit",
        line=f"{_CORPUS} && {_TOY.replace('TRAIN', 'METHOD=edit TRAIN')} {_TOY_SCRIPT} outputs/tutorial/edit "
        "&& megatron-ext local-sgd report outputs/tutorial/edit --last 3",
        minutes=3,
        resumes="outputs/tutorial/edit",
    ),
    Command(name="dense_to_evaluation", line="examples/spes/dense_to_evaluation.sh", minutes=6),
    Command(
        name="two_sites", line="examples/sync_service/two_sites.sh", minutes=3, needs=("root", "iproute2")
    ),
    Command(
        name="two_sites_int8",
        line="CODEC=int8 OUTPUT=outputs/two_sites_int8 examples/sync_service/two_sites.sh",
        minutes=3,
        needs=("root", "iproute2"),
    ),
    Command(name="chaos", line=_each(_CHAOS, seeds=range(100, 110), then="--minutes 3"), minutes=40),
    Command(name="chaos_in_time", line=_each(_CHAOS, seeds=range(100, 103), then="--minutes 3"), minutes=12),
    Command(name="chaos_60_an_hour", line=f"{_CHAOS} --seed 7 --minutes 9 --faults-per-hour 60", minutes=10),
    Command(name="chaos_seeds", line=f"{_CHAOS} --seeds 100-109 --minutes 2 --table", minutes=25),
    Command(name="chaos_shards", line=f"{_CHAOS} --seeds 200-203 --minutes 1 --shards 2 --table", minutes=6),
    Command(name="chaos_guards", line=f"{_CHAOS} --seeds 402-405 --minutes 1 --guards --table", minutes=6),
    Command(
        name="chaos_experts",
        line=f"{_CHAOS} --seeds 530-533 --minutes 1 --experts --tls --shards 2 --table",
        minutes=6,
    ),
    Command(
        name="chaos_jobs",
        line=f"{_CHAOS} --jobs --seeds 2 5 --minutes 1 --faults-per-hour 720 --table",
        minutes=10,
    ),
    Command(
        name="simulate_local_sgd",
        line="megatron-ext simulate local-sgd --model llama-7b --workers 4 --worker-gpus 64 --bandwidth 10 "
        "--step-seconds 5 --step-tokens 1000000 --local-sgd-sync-interval 100 --local-sgd-codec bf16 --jitter 0.05 "
        "--mtbf-hours 1000 --save-interval 500 --save-seconds 30",
        minutes=0.2,
    ),
    Command(
        name="simulate_sync_service",
        line="megatron-ext simulate sync-service --parameters 1e9 --peers 64 --peer-gpus 8 --bandwidth 1 "
        "--server-bandwidth 25 --reduction 2000 --step-seconds 2 --step-tokens 500000 --sync-service-interval 500 "
        "--steps 10000 --quorum 60 --grace-seconds 60 --jitter 0.1 --mtbf-hours 5000",
        minutes=0.2,
    ),
    Command(
        name="simulate_hot_switch",
        line="megatron-ext simulate hot-switch --model llama-7b --hot-switch-strategies 1,4,2 8,1,1 2,2,2 "
        "--hot-switch-bucket-sizes 32768 16384 4096 0 --mean-length 620 --length-spread 1.2 "
        "--hot-switch-attention fused-rows --memory-gib 73.3",
        minutes=0.5,
    ),
    Command(
        name="simulate_hot_switch_documents",
        line="megatron-ext simulate hot-switch --model llama-7b --hot-switch-strategies 1,4,2 8,1,1 2,2,2 "
        "--hot-switch-bucket-sizes 32768 16384 4096 0 --mean-length 620 --length-spread 1.2 --memory-gib 73.3",
        minutes=0.5,
    ),
    Command(
        name="local_sgd_suggest",
        line="megatron-ext local-sgd suggest --model llama-7b --workers 4 --bandwidth 10 --step-seconds 5",
        minutes=0.2,
    ),
    Command(
        name="hot_switch_plan",
        line="megatron-ext hot-switch plan --model llama-7b --gpus-per-node 8 --strategies 1,4,2 8,1,1 2,2,2",
        minutes=0.2,
    ),
    Command(
        name="hot_switch_plan_github",
        line="megatron-ext hot-switch plan --model llama-7b --strategies 1,4,2 8,1,1 4,2,1 2,2,2 "
        "&& megatron-ext hot-switch plan --model llama-13b --strategies 1,8,1 4,2,1 2,2,2 1,4,2 "
        "&& megatron-ext hot-switch plan --model llama-13b --strategies 2,8,1 8,2,1 4,2,2 4,4,1",
        minutes=0.3,
    ),
    Command(
        name="hot_switch_plan_joint",
        line="megatron-ext hot-switch plan --model llama-13b --strategies 3,4,2 12,2,1 "
        "&& megatron-ext hot-switch plan --model llama-13b --strategies 3,4,2 12,2,1 --algorithm joint",
        minutes=0.2,
    ),
    Command(
        name="hot_switch_suggest",
        line=f"{_CORPUS} && megatron-ext hot-switch suggest --model llama-7b --gpus 8 "
        "--lengths outputs/tutorial/corpus --context 32768",
        minutes=1,
    ),
    Command(
        name="hot_switch_profile",
        line="megatron-ext hot-switch profile --model llama-3b --pp 4 --output outputs/times.json",
        minutes=2,
        needs=("a GPU",),
    ),
)

BY_NAME = {command.name: command for command in COMMANDS}
