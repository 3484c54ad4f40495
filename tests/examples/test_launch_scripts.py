# SPDX-License-Identifier: Apache-2.0
"""The launch scripts start on CPU at toy size, and Megatron accepts what they start on GPUs."""

import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.examples.desk import RECORD_ARGUMENTS, TRAIN_UNTIL_TOLD, Desk, finish_together, split_at_script, validated
from tests.support.corpus import make, write_without_record
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.ports import free_port

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


def parse(arguments: list[str], world_size: int) -> dict[str, Any]:
    """Return what of a validated command line the tests here look at."""
    args = validated(arguments, world_size)
    names = (
        "data_parallel_size",
        "local_sgd_workers",
        "use_local_sgd",
        "outer_optimizer_nesterov",
        "outer_optimizer_momentum",
        "local_sgd_skip_anomaly",
        "local_sgd_pseudo_gradnorm_reduce",
        "local_sgd_clip_pseudo_grad",
        "local_sgd_sync_interval",
        "exit_signal_handler",
        "save",
        "tensorboard_dir",
    )
    return {name: getattr(args, name) for name in names}


def test_the_penalty_and_more_arguments_are_asked_for_by_variables(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    chosen = {"BACKEND": "cpu", "METHOD": "edit", "EXTRA_ARGS": "--local-sgd-sync-interval 7 --exit-signal-handler"}
    code, output = desk.run(SINGLE_NODE, desk.outputs(), RECORDED_ARGUMENTS=str(recorded), **chosen)
    assert code == 0, output
    _, training = split_at_script(recorded.read_text().splitlines())
    [parsed] = run_ranks(parse, 1, training, 4)
    assert parsed["local_sgd_skip_anomaly"] and parsed["local_sgd_pseudo_gradnorm_reduce"]
    assert parsed["local_sgd_clip_pseudo_grad"] == 10 and parsed["outer_optimizer_momentum"] == 0.8
    assert parsed["local_sgd_sync_interval"] == 7 and parsed["exit_signal_handler"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"METHOD": "adam"}, "METHOD=adam is unknown; use diloco or edit"),
        ({"EXTRA_ARGS": "--mock-data"}, "EXTRA_ARGS has --mock-data, which is not checked against the data"),
    ],
    ids=["method", "data"],
)
def test_what_variables_cannot_be_is_refused(
    desk: Desk, script: Path, variables: Mapping[str, str], said: str
) -> None:
    code, output = desk.run(script, desk.outputs(), BACKEND="cpu", **variables)
    assert code == 1 and said in output


def test_vocabulary_files_and_data_become_megatron_arguments(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    write_without_record(desk.folder / "text", [[1, 2]])
    (desk.folder / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (desk.folder / "merges.txt").write_text("#version: 0.2\na b\n")
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
        (SINGLE_NODE, [], {"BACKEND": "cpu", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'; give a whole number above"),
        (SLURM, [], {"BACKEND": "cpu", "MASTER_PORT": "0"}, "MASTER_PORT is '0'; give a whole number above"),
        (MULTI_NODE, [], {"BACKEND": "cpu", "NUM_NODES": "x"}, "NUM_NODES is 'x'; give a whole number above"),
        (MULTI_NODE, [], {"BACKEND": "cpu", "NODE_RANK": "1"}, "NODE_RANK is '1'; give a whole number from 0 to 0"),
        (SINGLE_NODE, ["a", "b", "no/such"], {"BACKEND": "cpu"}, "DATA_PATH: there is no no/such.idx"),
        (SINGLE_NODE, ["a", "b", "c", "d"], {"BACKEND": "cpu"}, "but 4 arguments were given"),
        (MULTI_NODE, [], {}, "MASTER_ADDR is not set"),
        (SINGLE_NODE, ["--output", "a"], {"BACKEND": "cpu"}, "does not know the option --output; see --help"),
        (SLURM, [], {}, "not inside a SLURM job"),
        (SLURM, [], {**IN_SLURM_JOB, "SLURM_SUBMIT_DIR": "/"}, "submit the job from there"),
    ],
    ids=[
        "backend",
        "no gpu",
        "odd",
        "processes",
        "iterations",
        "port",
        "port in slurm",
        "nodes",
        "rank",
        "no data",
        "arguments",
        "no master",
        "unknown option",
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


@pytest.mark.parametrize(
    ("script", "environment"),
    [(SINGLE_NODE, {}), (MULTI_NODE, {"NUM_NODES": "1"}), (SLURM, {})],
    ids=["single node", "multi node", "slurm"],
)
def test_training_ends_with_the_script_that_started_it(
    desk: Desk, script: Path, environment: Mapping[str, str]
) -> None:
    desk.command("torchrun", TRAIN_UNTIL_TOLD)
    with desk.start(script, desk.outputs(), BACKEND="cpu", **environment) as started:
        code, output = started.end_alone()
    assert code != 0 and "told to end" in output, output


@pytest.mark.parametrize(
    ("script", "environment", "log"),
    [
        (SINGLE_NODE, {}, "checkpoints.log"),
        (MULTI_NODE, {"NUM_NODES": "2", "NODE_RANK": "1", "GPUS_PER_NODE": "1"}, "checkpoints.node1.log"),
        (SLURM, {}, "checkpoints.log"),
    ],
    ids=["single node", "multi node", "slurm"],
)
def test_a_log_is_quiet_and_whole_in_its_file_unless_it_is_to_be_verbose(
    desk: Desk, script: Path, environment: Mapping[str, str], log: str
) -> None:
    desk.command("torchrun", "echo '> initialized it'; echo trained; echo failed >&2; exit 3")
    code, output = desk.run(script, desk.outputs(), BACKEND="cpu", **environment)
    assert code == 3 and sorted(output.splitlines()) == ["failed", "trained"]
    kept = desk.folder / log
    assert sorted(kept.read_text().splitlines()) == ["> initialized it", "failed", "trained"]
    kept.unlink()
    code, output = desk.run(script, desk.outputs(), BACKEND="cpu", VERBOSE="1", **environment)
    assert code == 3 and "> initialized it" in output and not kept.exists()


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
        ended = finish_together(nodes)
    assert [code for code, _ in ended] == [0, 0], "".join(output[-6000:] for _, output in ended)
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
