# SPDX-License-Identifier: Apache-2.0
"""The launch scripts start on CPU at toy size, and Megatron accepts what they start on GPUs."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.corpus import make
from tests.support.distributed import REPOSITORY, free_port, run_ranks

FOLDER = REPOSITORY / "examples/local_sgd"
SINGLE_NODE = FOLDER / "train_gpt3_diloco_single_node.sh"
MULTI_NODE = FOLDER / "train_gpt3_diloco_multi_node.sh"
SLURM = FOLDER / "train_gpt3_diloco_slurm.sh"
SCRIPTS = (SINGLE_NODE, MULTI_NODE, SLURM)

IN_SLURM_JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "64",
    "SLURM_JOB_NODELIST": "node[0-63]",
    "SLURM_SUBMIT_DIR": str(REPOSITORY),
}
RECORD_ARGUMENTS = """printf '%s\\n' "$@" >"$RECORDED_ARGUMENTS"; echo "${CUDA_DEVICE_MAX_CONNECTIONS:-unset}" """


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running launch script. Leaving the context ends it, and the training that it started."""

    process: subprocess.Popen[bytes]
    output: Path

    def finish(self, timeout: float = 280.0) -> tuple[int, str]:
        """Wait for the end; return the exit code and everything that was written."""
        return self.process.wait(timeout), self.output.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # torchrun's processes have sessions of their own: it ends them when it is asked to end.
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            finally:
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A folder to work in, with commands of its own that come first on the PATH."""

    folder: Path

    def command(self, name: str, body: str) -> None:
        """Put a shell script on the PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def start(self, script: Path, arguments: Sequence[str] = (), **environment: str) -> "Started":
        """Start a launch script with the tests' Python on the PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        search_path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="output-")
        with open(descriptor, "w") as output:
            process = subprocess.Popen(
                [str(script), *arguments],
                cwd=self.folder,
                env={**kept, "PATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Started(process=process, output=Path(name))

    def run(self, script: Path, arguments: Sequence[str] = (), **environment: str) -> tuple[int, str]:
        """Run a launch script; return its exit code and everything that it wrote."""
        with self.start(script, arguments, **environment) as started:
            return started.finish()

    def outputs(self) -> list[str]:
        """Return the first two arguments of every script: where checkpoints and TensorBoard files go."""
        return [str(self.folder / "checkpoints"), str(self.folder / "tensorboard")]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(folder=tmp_path)


# Without training --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(FOLDER.rglob("*.sh")), ids=lambda path: path.name)
def test_bash_can_read_every_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_launch_script_is_tested_and_executable() -> None:
    assert set(SCRIPTS) == set(FOLDER.glob("*.sh"))
    assert all(os.access(script, os.X_OK) for script in SCRIPTS)


@pytest.mark.parametrize(
    ("script", "environment", "world_size", "data_parallel_size", "workers"),
    [
        (SINGLE_NODE, {}, 8, 4, 2),
        (MULTI_NODE, {"NUM_NODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "node0"}, 32, 4, 4),
        (SLURM, IN_SLURM_JOB, 512, 4, 4),
    ],
    ids=["single node", "multi node", "slurm"],
)
def test_megatron_accepts_what_is_started_on_gpus(
    desk: Desk,
    script: Path,
    environment: Mapping[str, str],
    world_size: int,
    data_parallel_size: int,
    workers: int,
) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("scontrol", "printf 'node%s\\n' 0 1 2")
    desk.command("srun", 'shift; SLURM_NODEID=5 exec "$@"')
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    code, output = desk.run(script, desk.outputs(), RECORDED_ARGUMENTS=str(recorded), **environment)
    assert code == 0, output
    words = recorded.read_text().splitlines()
    launch, training = split_at_script(words)
    assert int(launch["--nproc_per_node"]) * int(launch["--nnodes"]) == world_size
    if script != SINGLE_NODE:
        assert launch["--master_addr"] == "node0"
        assert launch["--node_rank"] == ("3" if script == MULTI_NODE else "5")
    assert output == "1\n"  # connections
    [parsed] = run_ranks(parse, 1, training, world_size)
    assert parsed["data_parallel_size"] == data_parallel_size
    assert parsed["local_sgd_workers"] == workers
    assert parsed["use_local_sgd"] and parsed["outer_optimizer_nesterov"]
    assert (parsed["save"], parsed["tensorboard_dir"]) == tuple(desk.outputs())


def split_at_script(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split torchrun's command line into its own options and the training script's arguments."""
    position = words.index(str(REPOSITORY / "examples/pretrain_gpt.py"))
    options = words[:position]
    return dict(zip(options[::2], options[1::2], strict=True)), words[position + 1 :]


def validated(arguments: list[str], world_size: int) -> Any:
    """Return a GPU run's command line, parsed and validated in a rank as the training script does it."""
    import torch
    from megatron.training import arguments as megatron_arguments

    from megatron_ext import patch_megatron

    if not torch.cuda.is_available():
        megatron_arguments.get_device_arch_version = lambda: 9
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *arguments]
    patch_megatron("cuda")
    return megatron_arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})


def parse(arguments: list[str], world_size: int) -> dict[str, Any]:
    """Return what of a validated command line the tests here look at."""
    args = validated(arguments, world_size)
    names = (
        "data_parallel_size",
        "local_sgd_workers",
        "use_local_sgd",
        "outer_optimizer_nesterov",
        "save",
        "tensorboard_dir",
    )
    return {name: getattr(args, name) for name in names}


def test_vocabulary_files_and_data_become_megatron_arguments(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    (desk.folder / "text.idx").touch()
    recorded = desk.folder / "arguments"
    arguments = [*desk.outputs(), "vocab.json", "merges.txt", "text"]
    code, output = desk.run(SINGLE_NODE, arguments, RECORDED_ARGUMENTS=str(recorded), BACKEND="cpu")
    assert code == 0, output
    line = " ".join(recorded.read_text().splitlines())
    assert "--data-path text --vocab-file vocab.json --merge-file merges.txt" in line
    assert "--mock-data" not in line


def test_the_slurm_script_starts_without_srun_outside_of_a_job(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    desk.command("srun", "exit 9")
    recorded = desk.folder / "arguments"
    code, output = desk.run(SLURM, RECORDED_ARGUMENTS=str(recorded), BACKEND="cpu")
    assert code == 0, output
    launch, training = split_at_script(recorded.read_text().splitlines())
    assert (launch["--nnodes"], launch["--node_rank"], launch["--nproc_per_node"]) == ("1", "0", "4")
    assert "--mock-data" in training


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        (SINGLE_NODE, [], {"BACKEND": "tpu"}, "BACKEND=tpu is unknown; use gpu or cpu"),
        (SINGLE_NODE, [], {}, "no NVIDIA GPU here"),
        (SINGLE_NODE, [], {"BACKEND": "cpu", "GPUS_PER_NODE": "3"}, "trains with 2, 4, 8 or 16 processes, not 3"),
        (SINGLE_NODE, [], {"BACKEND": "cpu", "GPUS_PER_NODE": "x"}, "GPUS_PER_NODE is 'x'; give a whole number above"),
        (SINGLE_NODE, [], {"BACKEND": "cpu", "TRAIN_ITERS": "abc"}, "TRAIN_ITERS is 'abc'; give a whole number above"),
        (SINGLE_NODE, ["a", "b", "no/such"], {"BACKEND": "cpu"}, "DATA_PATH: there is no no/such.idx"),
        (SINGLE_NODE, ["a", "b", "c", "d"], {"BACKEND": "cpu"}, "but 4 arguments were given"),
        (MULTI_NODE, [], {}, "MASTER_ADDR is not set"),
        (SLURM, [], {}, "not inside a SLURM job"),
        (SLURM, [], {**IN_SLURM_JOB, "SLURM_SUBMIT_DIR": "/"}, "submit the job from there"),
    ],
    ids=[
        "backend",
        "no gpu",
        "odd",
        "processes",
        "iterations",
        "no data",
        "arguments",
        "no master",
        "no job",
        "other folder",
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    desk: Desk, script: Path, arguments: list[str], environment: Mapping[str, str], message: str
) -> None:
    desk.command("torchrun", "echo started")
    desk.command("nvidia-smi", "exit 9")
    code, output = desk.run(script, arguments, **environment)
    assert code == 1
    assert message in output
    assert len(output.splitlines()) == 1


def test_without_torch_the_scripts_say_how_to_get_it(desk: Desk) -> None:
    desk.command("torchrun", "echo started")
    desk.command("python", "exit 1")
    checkout = desk.folder / "checkout"
    (checkout / "examples").mkdir(parents=True)
    (checkout / "examples/local_sgd").symlink_to(FOLDER)
    copied = checkout / "examples/train.sh"
    copied.write_text(SINGLE_NODE.read_text().replace("/../..", "/.."))
    copied.chmod(0o755)
    code, output = desk.run(copied, BACKEND="cpu")
    assert code == 1
    assert "no Python with torch and megatron.core" in output


# With training on CPU ----------------------------------------------------------------------------


def assert_trained(desk: Desk, output: str, iterations: int) -> None:
    """Check the log of a toy run with two workers, and its checkpoint."""
    last = re.findall(rf"iteration +{iterations}/ +{iterations} .*", output)
    assert len(last) == 1, output[-6000:]
    assert "workers: 2/2" in last[0]
    assert "lm loss:" in last[0]
    saved = (desk.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text()
    assert saved.strip() == str(iterations)


@pytest.mark.slow
def test_a_single_node_trains_on_cpu_on_given_text(desk: Desk) -> None:
    (desk.folder / "text").mkdir()
    for number in range(100):
        (desk.folder / "text" / f"{number}.txt").write_text("All work and no play makes a dull corpus.\n" * 50)
    make(desk.folder / "text", desk.folder / "corpus")
    arguments = [*desk.outputs(), str(desk.folder / "corpus")]
    environment = {"BACKEND": "cpu", "GPUS_PER_NODE": "2", "MASTER_PORT": str(free_port()), "TRAIN_ITERS": "2"}
    code, output = desk.run(SINGLE_NODE, arguments, **environment)
    assert code == 0, output[-6000:]
    assert_trained(desk, output, 2)


@pytest.mark.slow
def test_two_nodes_train_on_cpu_together(desk: Desk) -> None:
    common = {
        "BACKEND": "cpu",
        "NUM_NODES": "2",
        "GPUS_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
        "TRAIN_ITERS": "2",
    }
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(desk.start(MULTI_NODE, desk.outputs(), NODE_RANK=str(rank), **common))
            for rank in range(2)
        ]
        ended = [node.finish() for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended[0][1][-6000:]
    assert_trained(desk, "".join(output for _, output in ended), 2)


@pytest.mark.slow
def test_a_slurm_job_of_two_nodes_trains_on_cpu(desk: Desk) -> None:
    desk.command("scontrol", "printf '127.0.0.1\\n127.0.0.2\\n'")
    # Starts the task of each node here, as srun would there, and fails when one of them does.
    desk.command(
        "srun",
        '[ "$1" = --kill-on-bad-exit=1 ] || exit 9; shift\n'
        'SLURM_NODEID=1 "$@" & other=$!\n'
        'SLURM_NODEID=0 "$@" && wait "$other"',
    )
    job = {**IN_SLURM_JOB, "SLURM_JOB_NUM_NODES": "2"}
    code, output = desk.run(
        SLURM,
        desk.outputs(),
        BACKEND="cpu",
        GPUS_PER_NODE="1",
        MASTER_PORT=str(free_port()),
        TRAIN_ITERS="2",
        **job,
    )
    assert code == 0, output[-6000:]
    assert_trained(desk, output, 2)
