# SPDX-License-Identifier: Apache-2.0
"""The SPES scripts: what they start, and what they refuse."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient
from tests.examples.desk import JOB_MARK, RECORD_ARGUMENTS, TRAIN_UNTIL_TOLD, Desk, split_at_script, validated
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.ports import free_port
from tests.support.processes import marked_processes
from tests.support.waiting import until

FOLDER = REPOSITORY / "examples/spes"
SERVER = FOLDER / "run_parameter_server.sh"
NODE = FOLDER / "run_single_node.sh"
CLUSTER = FOLDER / "run_cluster.sh"
LISTENING = 'until [[ -e "$STATE_DIR/address" ]]; do sleep 0.1; done'
"""Continues when the server is there."""


@pytest.mark.parametrize("script", sorted(FOLDER.rglob("*.sh")), ids=lambda path: path.name)
def test_bash_can_read_and_run_every_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def parse(arguments: list[str], world_size: int) -> dict[str, Any]:
    """Return what of a validated command line the tests here look at."""
    from megatron_ext.spes.arguments import ownership_of

    args = validated(arguments, world_size)
    names = ("sync_service", "sync_service_peer", "sync_service_peers", "sync_service_interval", "save", "load")
    owned = ownership_of(args).owned_by(args.sync_service_index)
    return {"owned": owned, **{name: getattr(args, name) for name in names}}


def test_megatron_accepts_what_a_node_starts_on_gpus(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    environment = {"RECORDED_ARGUMENTS": str(recorded), "OUTPUT": str(desk.folder), "SERVER_ADDR": "127.0.0.1:5"}
    code, output = desk.run(NODE, ["3"], **environment)
    assert code == 0, output
    launch, training = split_at_script(recorded.read_text().splitlines())
    assert (launch["--nproc_per_node"], launch["--nnodes"], launch["--master_port"]) == ("8", "1", "29503")
    (parsed,) = run_ranks(parse, 1, training, 8)
    assert parsed == {
        "owned": (6, 7),
        "sync_service": "127.0.0.1:5",
        "sync_service_peer": "node3",
        "sync_service_peers": 4,
        "sync_service_interval": 100,
        "save": str(desk.folder / "node3"),
        "load": None,
    }
    (desk.folder / "node3").mkdir()
    (desk.folder / "node3/latest_checkpointed_iteration.txt").write_text("1000")
    code, output = desk.run(NODE, ["3", "--resume"], **environment)
    assert code == 0, output
    assert recorded.read_text().splitlines()[-2:] == ["--load", str(desk.folder / "node3")]
    code, output = desk.run(NODE, ["3"], **environment)
    assert code == 1 and "has a checkpoint already; add --resume" in output


def parse_sizes(arguments: list[str], world_size: int) -> tuple[int, int, int, int | None, int | None]:
    """Return the sizes of a validated command line: experts, batch, iterations, owned experts, interval."""
    from megatron_ext.spes.arguments import ownership_of

    args = validated(arguments, world_size)
    ownership = ownership_of(args)
    owned = None if ownership is None else len(ownership.owned_by(args.sync_service_index))
    return args.num_experts, args.global_batch_size, args.train_iters, owned, args.sync_service_interval


def test_the_papers_runs_and_baselines_are_what_megatron_gets(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("torchrun", RECORD_ARGUMENTS)
    recorded = desk.folder / "arguments"
    for model, mode, wanted in (
        ("1b", "spes", (16, 1024, 50_000, 4, 100)),
        ("1b", "diloco", (16, 256, 50_000, 16, 50)),
        ("1b", "centralized", (16, 1024, 50_000, None, None)),
        ("7b", "spes", (32, 1024, 500_000, 8, 100)),
        ("9b", "diloco", (8, 256, 200_000, 8, 50)),
    ):
        environment = {"RECORDED_ARGUMENTS": str(recorded), "OUTPUT": str(desk.folder), "MODEL": model, "MODE": mode}
        code, output = desk.run(NODE, ["0"], **environment)
        assert code == 0, output
        _, training = split_at_script(recorded.read_text().splitlines())
        assert run_ranks(parse_sizes, 1, training, 8) == [wanted]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "NODE_ID is missing"),
        (["one"], {}, "NODE_ID is one; give 0, 1, ..."),
        (["1", "again"], {}, "takes NODE_ID [--resume] [--check] [--dry-run], but was given: 1 again"),
        (["1"], {"BACKEND": "tpu"}, "BACKEND=tpu is unknown; use gpu or cpu"),
        (["1"], {}, "no NVIDIA GPU here"),
        (["1"], {"MODEL": "3b"}, "MODEL=3b is unknown; use 1b, 7b or 9b"),
        (["1"], {"MODE": "fedavg"}, "MODE=fedavg is unknown; use spes, diloco or centralized"),
        (["1"], {"MODE": "centralized"}, "MODE=centralized trains on one node; NODE_ID is 1, give 0"),
        (["1", "--resume"], {"BACKEND": "cpu"}, "--resume: there is no checkpoint in"),
        (["1"], {"BACKEND": "cpu", "DATA_PATH": "no/such"}, "DATA_PATH: there is no no/such.idx; give the prefix that"),
        (["1"], {"MASTER_PORT": "999999"}, "MASTER_PORT is '999999'; give a port, 1 to 65535"),
        (["1"], {"SPES_CONFIG": "no/such"}, "SPES_CONFIG: there is no file no/such, or it cannot be read"),
        (["1"], {"TOKEN_FILE": "/root"}, "TOKEN_FILE: there is no file /root, or it cannot be read"),
        (["1"], {"BACKEND": "cpu", "VOCAB_FILE": "v.json"}, "VOCAB_FILE is 'v.json' and MERGE_FILE ''; set both, or"),
        (["1"], {"BACKEND": "cpu", "VOCAB_FILE": "v", "MERGE_FILE": "m"}, "VOCAB_FILE is for the data of a DATA_PATH"),
    ],
)
def test_bad_input_of_a_node_is_refused_with_the_way_out(
    desk: Desk,
    arguments: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    desk.command("torchrun", "echo started")
    desk.command("nvidia-smi", "exit 9")
    code, output = desk.run(NODE, arguments, OUTPUT=str(desk.folder / "out"), **environment)
    assert code == 1 and message in output and len(output.splitlines()) == 1, output


def test_a_nodes_log_is_quiet_and_whole_in_its_file_unless_it_is_to_be_verbose(desk: Desk) -> None:
    desk.command("torchrun", "echo '> initialized it'; echo trained; echo failed >&2; exit 3")
    settings = {"BACKEND": "cpu", "MODE": "centralized", "OUTPUT": str(desk.folder / "out")}
    code, output = desk.run(NODE, ["0"], **settings)
    assert code == 3 and sorted(output.splitlines()) == ["failed", "trained"]
    log = desk.folder / "out/node0.log"
    assert sorted(log.read_text().splitlines()) == ["> initialized it", "failed", "trained"]
    log.unlink()
    code, output = desk.run(NODE, ["0"], **settings, VERBOSE="1")
    assert code == 3 and "> initialized it" in output and not log.exists()


@pytest.mark.parametrize(
    ("number", "last"), [(signal.SIGTERM, "told to end"), (signal.SIGINT, "KeyboardInterrupt")], ids=["TERM", "INT"]
)
def test_a_signal_to_a_node_reaches_its_training_whose_last_line_is_shown(
    desk: Desk, number: signal.Signals, last: str
) -> None:
    desk.command("torchrun", TRAIN_UNTIL_TOLD)
    settings = {"BACKEND": "cpu", "MODE": "centralized", "OUTPUT": str(desk.folder / "out")}
    with desk.start(NODE, ["0"], **settings) as node:
        until(lambda: "training" in node.output.read_text() or node.process.poll() is not None, "training")
        node.process.send_signal(number)
        code, output = node.finish()
    assert code in (1, 128 + number) and output.splitlines()[-1] == last


def without_explaining(desk: Desk, instead: str = "exit 0") -> None:
    """Put a Python on the PATH that says of every training that it is valid, which takes seconds."""
    desk.command("python", f'if [[ $* == *" explain "* ]]; then {instead}; fi; exec {sys.executable} "$@"')


def test_a_check_of_a_node_looks_at_what_a_start_would_train_with_and_starts_nothing(desk: Desk) -> None:
    desk.command("torchrun", "echo started; " + RECORD_ARGUMENTS)
    settings = {"BACKEND": "cpu", "OUTPUT": str(desk.folder / "out"), "EXTRA_ARGS": "--seed 7"}
    checked, started = desk.folder / "checked", desk.folder / "started"
    without_explaining(desk, f"{RECORD_ARGUMENTS}; exit 0")
    assert desk.run(NODE, ["2", "--check"], RECORDED_ARGUMENTS=str(checked), **settings) == (0, "")
    assert not (desk.folder / "out").exists()
    assert desk.run(NODE, ["2"], RECORDED_ARGUMENTS=str(started), **settings)[0] == 0
    words = checked.read_text().splitlines()
    assert words[words.index("--") + 1 :] == split_at_script(started.read_text().splitlines())[1]


def test_a_check_of_a_node_refuses_what_its_training_would(desk: Desk) -> None:
    desk.command("torchrun", "echo started")
    code, output = desk.run(NODE, ["9", "--check"], BACKEND="cpu", OUTPUT=str(desk.folder / "out"))
    said = "megatron-ext: error: arguments: --sync-service-index is 9; it must be 0 to --sync-service-peers minus 1"
    assert code != 0 and output.splitlines()[-1] == said and "started" not in output


def test_a_node_id_that_is_alive_on_this_machine_is_refused_before_anything_starts(desk: Desk) -> None:
    settings = {"BACKEND": "cpu", "OUTPUT": str(desk.folder / "out")}
    desk.command("torchrun", TRAIN_UNTIL_TOLD)
    with desk.start(NODE, ["2"], **settings) as node:
        until(lambda: "training" in node.output.read_text() or node.process.poll() is not None, "training")
        desk.command("torchrun", "echo started")
        for verbose in ("0", "1"):
            code, output = desk.run(NODE, ["2"], **settings, VERBOSE=verbose)
            assert code == 1 and len(output.splitlines()) == 1, output
            assert "a peer with NODE_ID=2 is running on this machine, with its checkpoints in" in output
            assert "give another NODE_ID, or end that peer first" in output
        assert desk.run(NODE, ["1"], **settings) == (0, "started\n")
        node.process.send_signal(signal.SIGTERM)
        node.finish()
    assert desk.run(NODE, ["2"], **settings) == (0, "started\n")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"MODEL": "3b"}, "MODEL=3b is unknown; use 1b, 7b or 9b"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE is '0'; give a whole number"),
        ({"PEER_MASTER_PORT": "65536"}, "PEER_MASTER_PORT is '65536'; give a port"),
        ({"SPES_CONFIG": "no/such"}, "SPES_CONFIG: there is no file no/such"),
    ],
)
def test_a_cluster_starts_no_server_for_a_node_that_cannot_start(
    desk: Desk, wrong: dict[str, str], message: str
) -> None:
    desk.command("torchrun", "echo started")
    environment, _ = first_node(desk)
    code, output = desk.run(CLUSTER, **environment, **wrong)
    assert code == 1 and message in output and "started" not in output, output
    assert not (desk.folder / "state").exists()


def test_the_server_starts_with_the_scripts_variables(desk: Desk) -> None:
    state = desk.folder / "state"
    with desk.start(SERVER, PORT="0", STATE_DIR=str(state), TOTAL_PEERS="2", MERGE_INTERVAL="200") as started:
        until(lambda: "listening at" in started.output.read_text() or started.process.poll() is not None, "the start")
        assert "listening at 127.0.0.1:" in started.output.read_text(), started.output.read_text()
        started.process.terminate()
        assert started.finish()[0] == 0
    assert '"peers":2' in (state / "runs/spes/journal.jsonl").read_text().replace(" ", "")


def test_the_server_of_peers_that_train_everything_has_an_outer_optimizer_and_merges_nothing(desk: Desk) -> None:
    desk.command("python", RECORD_ARGUMENTS)
    official = {"MODE": "diloco", "NUM_TRAIN_EXPERTS_PER_NODE": "8"}
    code, output = desk.run(SERVER, RECORDED_ARGUMENTS=str(desk.folder / "arguments"), **official)
    assert code == 0, output
    assert "NUM_TRAIN_EXPERTS_PER_NODE is not read here: every peer says itself which experts it trains" in output
    given = (desk.folder / "arguments").read_text().splitlines()
    assert given[given.index("--sync-steps") :] == ["--sync-steps", "50", "--outer-optimizer", "sgd"]
    for script, own in ((SERVER, {}), (CLUSTER, {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "INSECURE": "1"})):
        code, output = desk.run(script, MODE="centralized", **own)
        assert code == 1 and "MODE=centralized needs no server" in output


@pytest.mark.parametrize("number", ["08", "-1", "1.5"])
def test_numbers_that_shells_misread_are_refused(desk: Desk, number: str) -> None:
    code, output = desk.run(CLUSTER, RANK=number, MASTER_ADDR="127.0.0.1", INSECURE="1")
    assert code == 1 and f"RANK is {number}; set it to 0, 1, ..." in output
    code, output = desk.run(NODE, [number])
    assert code == 1 and f"NODE_ID is {number}; give 0, 1, ..." in output


def test_a_cluster_has_a_server_on_its_first_node_and_a_peer_on_each(desk: Desk) -> None:
    state, port = desk.folder / "state", free_port()
    # Training takes until the server is there.
    waits = f"if [[ -n ${{WAITS:-}} ]]; then {LISTENING}; fi"
    desk.command("torchrun", f"{RECORD_ARGUMENTS}\n{waits}")
    environment = {
        "BACKEND": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "NPROC_PER_NODE": "2",
        "WORLD_SIZE": "9",
        "PORT": str(port),
        "INSECURE": "1",
        "STATE_DIR": str(state),
        "OUTPUT": str(desk.folder),
    }
    for rank in (1, 0):
        recorded = desk.folder / f"arguments{rank}"
        own = {"RANK": str(rank), "RECORDED_ARGUMENTS": str(recorded), **({"WAITS": "1"} if rank == 0 else {})}
        code, output = desk.run(CLUSTER, **environment, **own)
        assert code == 0, output
        launch, training = split_at_script(recorded.read_text().splitlines())
        assert launch["--nproc_per_node"] == "2"
        wanted = ["--sync-service-index", str(rank), "--sync-service", f"127.0.0.1:{port}"]
        wanted.append("--sync-service-insecure")
        assert wanted == training[training.index("--sync-service-index") :][:5]
        assert (f"listening at 0.0.0.0:{port}" in output) == (rank == 0), output
    for missing, sentence in (
        ("RANK", "RANK is not set"),
        ("MASTER_ADDR", "MASTER_ADDR is not"),
        ("INSECURE", "or INSECU"),
    ):
        code, output = desk.run(CLUSTER, **{**environment, "RANK": "1", missing: ""})
        assert code == 1 and sentence in output


def test_the_files_that_secure_a_cluster_may_have_spaces_in_their_names(desk: Desk) -> None:
    recorded = desk.folder / "arguments"
    desk.command("torchrun", RECORD_ARGUMENTS)
    folder = desk.folder / "keys of all"
    folder.mkdir()
    files = {name: str(folder / name) for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")}
    for file in files.values():
        Path(file).touch()
    environment = {"BACKEND": "cpu", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "OUTPUT": str(desk.folder), **files}
    # What INSECURE allows is not wanted where there is TLS.
    code, output = desk.run(CLUSTER, RECORDED_ARGUMENTS=str(recorded), INSECURE="1", **environment)
    assert code == 0, output
    training = split_at_script(recorded.read_text().splitlines())[1]
    wanted = ["--sync-service-token-file", files["TOKEN_FILE"], "--sync-service-tls-ca", files["TLS_CA"]]
    assert training[training.index("--sync-service-token-file") :][:4] == wanted
    assert "--sync-service-insecure" not in training


def test_slurm_says_which_peer_a_node_is_and_where_the_first_one_is(desk: Desk) -> None:
    recorded = desk.folder / "arguments"
    desk.command("torchrun", RECORD_ARGUMENTS)
    desk.command("scontrol", "[[ $* == 'show hostnames node[7-8]' ]] && printf 'node7\\nnode8\\n'")
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment = {**slurm, "BACKEND": "cpu", "INSECURE": "1", "OUTPUT": str(desk.folder)}
    environment |= {"RANK": "", "MASTER_ADDR": ""}
    code, output = desk.run(CLUSTER, RECORDED_ARGUMENTS=str(recorded), **environment)
    assert code == 0, output
    training = split_at_script(recorded.read_text().splitlines())[1]
    wanted = ["--sync-service-index", "1", "--sync-service", "node7:50051"]
    assert training[training.index("--sync-service-index") :][:4] == wanted
    code, output = desk.run(CLUSTER, **{**environment, "SLURM_LOCALID": "1"})
    assert code == 1 and "a peer needs a node of its own; use srun --ntasks-per-node=1" in output
    # As in a container, which has no SLURM inside.
    desk.command("scontrol", "exit 127")
    code, output = desk.run(CLUSTER, **environment)
    assert code == 1 and "MASTER_ADDR is not set; set it to the address of the node of RANK 0" in output


def test_a_cluster_is_started_over_ssh_and_a_peer_that_fails_ends_no_other(desk: Desk) -> None:
    host = "${@: -2:1}"
    desk.command("ssh", f"""printf '%s\\n' "${{@: -1}}" >"$RECORDS/{host}.ssh"; [[ {host} != beta ]] || exit 3""")
    (desk.folder / "hosts").write_text("me@alpha slots=2\nbeta slots=2\n")
    environment = {"RECORDS": str(desk.folder), "TOTAL_PEERS": "2", "INSECURE": "1"}
    environment |= {"NCCL_IB_HCA": "mlx5", "OTHER": "x"}
    code, output = desk.run(CLUSTER, ["--hosts", "hosts", "--resume"], **environment)
    assert code == 3 and "the peer on beta has ended with exit code 3" in output, output
    for rank, name in enumerate(("me@alpha", "beta")):
        (command,) = (desk.folder / f"{name}.ssh").read_text().splitlines()
        words = shlex.split(command)
        assert words[:4] == ["cd", str(desk.folder), "&&", "exec"]
        assert {"NCCL_IB_HCA=mlx5", "TOTAL_PEERS=2", "INSECURE=1"} <= set(words) and "OTHER=x" not in words
        own = ["env", f"RANK={rank}", "MASTER_ADDR=alpha", "NPROC_PER_NODE=2", str(CLUSTER), "--resume"]
        assert words[-len(own) :] == own
    for arguments, said in (
        (["--hosts"], "--hosts needs a file with a line 'HOST slots=GPUS'"),
        (["--hosts", "nowhere"], "there is no file nowhere"),
        (["--hosts", "hosts"], "there are 2 hosts for 4 peers; set TOTAL_PEERS"),
    ):
        code, output = desk.run(CLUSTER, arguments, RECORDS=str(desk.folder))
        assert code == 1 and said in output


def first_node(desk: Desk) -> tuple[dict[str, str], int]:
    """Return the environment of a cluster's first node, and the server's port."""
    port = free_port()
    environment = {"BACKEND": "cpu", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "INSECURE": "1", "PORT": str(port)}
    environment |= {"STATE_DIR": str(desk.folder / "state"), "OUTPUT": str(desk.folder), "MERGE_INTERVAL": "0"}
    return environment, port


def node1(port: int) -> SyncClient:
    """Return a client that is another node's peer."""
    config = ClientConfig(
        connection=ConnectionConfig(server=f"127.0.0.1:{port}"),
        run="spes",
        peer="node1",
        agreed={"--sync-service-interval": "100"},
    )
    return SyncClient(config, {"w": torch.zeros(4)})


@pytest.mark.slow
def test_the_server_of_a_cluster_outlives_its_own_nodes_peer(desk: Desk) -> None:
    desk.command("torchrun", f"{LISTENING}; exit 3")
    environment, port = first_node(desk)
    values = {"w": torch.zeros(4)}
    with desk.start(CLUSTER, **environment, TOTAL_PEERS="1") as cluster:
        until(lambda: "listening at" in cluster.output.read_text(), "the server")
        with node1(port) as other:
            other.start(values)
            until(lambda: "the server continues for the others" in cluster.output.read_text(), "the peer's end")
            for _ in range(3):
                other.sync(values)
            other.leave()
        code, output = cluster.finish()
    assert code == 3 and "this peer has failed (exit code 3)" in output


@pytest.mark.slow
def test_the_server_of_a_cluster_does_not_wait_forever_for_a_peer_that_is_gone(desk: Desk) -> None:
    desk.command("torchrun", f"{LISTENING}; sleep 3")
    environment, port = first_node(desk)
    with desk.start(CLUSTER, **environment, WAIT_SECONDS="6") as cluster:
        until(lambda: "listening at" in cluster.output.read_text(), "the server")
        with node1(port) as other:
            other.register()
        code, output = cluster.finish(60.0)
    # Its own peer has trained to the end.
    assert code == 1 and "the server continues until node1 are done; `server evict` removes one" in output, output
    assert re.search(r"no call from node1 for \d+ s \(WAIT_SECONDS\): ending the server, whose state", output)


@pytest.mark.slow
def test_a_server_that_dies_while_others_train_is_a_failure(desk: Desk) -> None:
    desk.command("torchrun", LISTENING)
    environment, port = first_node(desk)
    with desk.start(CLUSTER, **environment) as cluster:
        until(lambda: "listening at" in cluster.output.read_text(), "the server")
        with node1(port) as other:
            other.register()
            until(lambda: "until node1 are done" in cluster.output.read_text(), "the end of the node's own peer")
            (server,) = [
                found.pid for found in marked_processes(JOB_MARK, cluster.job) if "server start" in found.command
            ]
            os.kill(server, signal.SIGKILL)
            code, output = cluster.finish(60.0)
    assert code == 137, output
    assert "the server has ended with exit code 137; its state stays in" in output and "again with --resume" in output


@pytest.mark.slow
def test_all_of_a_node_ends_with_the_script_that_started_it(desk: Desk) -> None:
    desk.command("torchrun", TRAIN_UNTIL_TOLD)
    environment, _ = first_node(desk)
    (desk.folder / "hosts").write_text("localhost slots=1\n")
    for script, arguments in ((NODE, ["0"]), (CLUSTER, []), (CLUSTER, ["--hosts", "hosts"])):
        with desk.start(script, arguments, **environment, TOTAL_PEERS="1") as started:
            code, output = started.end_alone()
        assert code != 0 and output.splitlines().count("told to end") == 1, output


def test_a_clusters_server_merges_as_the_papers_9b_run_does(desk: Desk) -> None:
    recorded = desk.folder / "arguments"
    desk.command("torchrun", "exit 0")
    environment, _ = first_node(desk)
    # The server's command line, and then its end.
    without_explaining(desk, "exit 0; fi; " + f'if [[ $* == *"server start"* ]]; then {RECORD_ARGUMENTS}; exit 1')
    for given, wanted in (({}, ("0.05", "20000")), ({"MERGE_ALPHA_START": "0.1"}, ("0.1", "20000"))):
        own = {**environment, "MERGE_INTERVAL": "500", **given}
        code, output = desk.run(CLUSTER, RECORDED_ARGUMENTS=str(recorded), **own)
        assert code == 1 and "the server has not started" in output, output
        words = recorded.read_text().splitlines()
        found = [words[words.index(f"--merge-{name}") + 1] for name in ("alpha-start", "decay-steps")]
        assert tuple(found) == wanted


def test_numbers_of_the_server_that_are_none_are_refused(desk: Desk) -> None:
    for name, value in (("MERGE_INTERVAL", "abc"), ("TOTAL_PEERS", "0"), ("PORT", "-1")):
        code, output = desk.run(SERVER, STATE_DIR=str(desk.folder / "state"), **{name: value})
        assert code == 1 and f"{name} is '{value}'" in output


def test_a_node_whose_server_does_not_start_has_no_peer_that_meets_another_one(desk: Desk) -> None:
    recorded = desk.folder / "arguments"
    desk.command("torchrun", RECORD_ARGUMENTS)
    without_explaining(desk)
    environment = {"BACKEND": "cpu", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "INSECURE": "1", "BIND": "127.0.0.1"}
    environment |= {"STATE_DIR": str(desk.folder / "state"), "OUTPUT": str(desk.folder)}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, output = desk.run(CLUSTER, PORT=port, RECORDED_ARGUMENTS=str(recorded), **environment)
    assert code == 1 and "the server has not started (see above), so this node's peer is not either" in output, output
    assert "cannot listen there" in output and not recorded.exists()
    code, output = desk.run(CLUSTER, **environment, PORT="x")
    assert code == 1 and "PORT is 'x'; give a whole number" in output


@pytest.mark.slow
def test_the_server_of_a_cluster_waits_for_peers_that_come_after_its_own_nodes_has_failed(desk: Desk) -> None:
    desk.command("torchrun", "exit 3")
    environment, port = first_node(desk)
    own = {"TRAIN_ITERS": "777", "EXTRA_ARGS": "--seed 7", "NPROC_PER_NODE": "3", "PEER_MASTER_PORT": "31111"}
    with desk.start(CLUSTER, **environment, **own, MASTER_PORT="9") as cluster:
        until(lambda: "the server continues for the others" in cluster.output.read_text(), "the peer's end")
        # Longer than two answers take.
        time.sleep(12)
        assert cluster.process.poll() is None
        with node1(port) as other:
            other.register()
            other.leave()
        code, output = cluster.finish()
    assert code == 3, output
    # What was set is set again, and starts the same training.
    (again,) = [line.partition("again on this node: ")[2] for line in output.splitlines() if "again on this" in line]
    recorded = desk.folder / "arguments"
    desk.command("torchrun", RECORD_ARGUMENTS)
    path = f"{desk.folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    bare = {"PATH": path, "RECORDED_ARGUMENTS": str(recorded)}
    subprocess.run(again, shell=True, env=bare, check=True)
    launch, training = split_at_script(recorded.read_text().splitlines())
    assert launch["--nproc_per_node"] == "3" and launch["--master_port"] == "31111"
    assert training[training.index("--train-iters") + 1] == "777" and training[-2:] == ["--seed", "7"]
    assert training[training.index("--save") + 1] == str(desk.folder / "node0")
