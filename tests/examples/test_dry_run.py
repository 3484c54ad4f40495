# SPDX-License-Identifier: Apache-2.0
"""--dry-run of the launch scripts: they print what they would start, have it explained, and end as that does."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.examples.desk import RECORD_ARGUMENTS, Desk
from tests.support.distributed import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
SINGLE = EXAMPLES / "local_sgd/train_gpt3_diloco_single_node.sh"
MULTI = EXAMPLES / "local_sgd/train_gpt3_diloco_multi_node.sh"
SLURM = EXAMPLES / "local_sgd/train_gpt3_diloco_slurm.sh"
PEER, CLUSTER = EXAMPLES / "spes/run_single_node.sh", EXAMPLES / "spes/run_cluster.sh"
HOT, STATIC = EXAMPLES / "hot_switch/llama_hot_switch.sh", EXAMPLES / "hot_switch/llama_static_parallel.sh"
CASES = {
    "single node": (SINGLE, [], {}, (8, 1)),
    "several nodes": (MULTI, [], {"NUM_NODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "node0"}, (8, 4)),
    "SLURM": (SLURM, [], {}, (8, 64)),
    "SPES": (PEER, ["1"], {"MODEL": "1b", "VERBOSE": "1"}, (8, 1)),
    "SPES on a cluster": (CLUSTER, [], {"INSECURE": "1", "NPROC_PER_NODE": "4"}, (4, 1)),
    "hot switching": (HOT, ["7b", "8192"], {}, (8, 1)),
    "one strategy": (STATIC, ["7b", "8192"], {}, (8, 1)),
}
"""Script, arguments, environment, and the ranks of a node and nodes that it starts."""

EXPLAINED = """case " $* " in
    *" megatron_ext.cli.main explain "*) printf '%s\\n' "$@" >"$EXPLAINED"; echo explained; exit "${{STATUS:-0}}" ;;
    *) exec {python} "$@" ;;
esac"""
"""A stand-in for python that says that it was to explain, and refuses that where it is told to."""


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_prints_and_explains_the_command_and_starts_nothing(desk: Desk, name: str) -> None:
    script, arguments, environment, (processes, nodes) = CASES[name]
    code, output, words, started = dry_run(desk, script, [*arguments, "--dry-run"], **environment)
    assert code == 0, output
    command, said = output.splitlines()
    assert said == "explained"
    assert not started
    printed = shlex.split(command)
    end = words.index("--")
    assert words[: end + 1] == [
        *("-m", "megatron_ext.cli.main", "explain"),
        *("--nproc-per-node", str(processes), "--nnodes", str(nodes), "--backend", "cuda", "--"),
    ]
    assert "torchrun" in command
    assert printed[printed.index(str(EXAMPLES / "pretrain_gpt.py")) + 1 :] == words[end + 1 :]


@pytest.mark.parametrize("name", ["single node", "SPES", "hot switching"])
def test_a_dry_run_of_what_is_refused_shows_the_refusal_alone(desk: Desk, name: str) -> None:
    script, arguments, environment, _ = CASES[name]
    code, output, _, _ = dry_run(desk, script, [*arguments, "--dry-run"], STATUS="3", **environment)
    assert (code, output) == (3, "explained\n")


@pytest.mark.parametrize("name", ["single node", "several nodes", "SPES", "hot switching", "one strategy"])
def test_what_is_explained_is_what_a_start_trains(desk: Desk, name: str) -> None:
    script, arguments, environment, _ = CASES[name]
    _, _, words, _ = dry_run(desk, script, [*arguments, "--dry-run"], **environment)
    recorded = desk.folder / "started"
    desk.command("torchrun", RECORD_ARGUMENTS)
    desk.command("nvidia-smi", "exit 0")
    code, output = desk.run(script, arguments, BACKEND="gpu", RECORDED_ARGUMENTS=str(recorded), **environment)
    assert code == 0, output
    given = recorded.read_text().splitlines()
    assert given[given.index(str(EXAMPLES / "pretrain_gpt.py")) + 1 :] == words[words.index("--") + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_scripts_start_at_toy_size_is_valid(desk: Desk, name: str) -> None:
    script, arguments, environment, _ = CASES[name]
    sizes = ("NUM_NODES", "NODE_RANK", "NPROC_PER_NODE")
    given = {key: value for key, value in environment.items() if key not in sizes}
    code, output = desk.run(script, [*arguments, "--dry-run"], BACKEND="cpu", **given)
    assert code == 0, output
    assert "\nvalid: " in output


def dry_run(
    desk: Desk, script: Path, arguments: list[str], **environment: str
) -> tuple[int, str, list[str], bool]:
    """Return exit code, output, what `python` was to explain, and whether torchrun was called."""
    explained, started = desk.folder / "explained", desk.folder / "was-started"
    desk.command("python", EXPLAINED.format(python=shlex.quote(sys.executable)))
    desk.command("torchrun", f"touch {shlex.quote(str(started))}")
    code, output = desk.run(script, arguments, BACKEND="gpu", EXPLAINED=str(explained), **environment)
    return code, output, explained.read_text().splitlines() if explained.exists() else [], started.exists()
