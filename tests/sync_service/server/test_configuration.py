# SPDX-License-Identifier: Apache-2.0
"""Bad configuration gets one clear error that names the field; the shipped one is good."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, SyncClient
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.refusal import Refusal
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.server.config import ServerConfig, read_config

REPOSITORY = Path(__file__).resolve().parents[3]
RUN = {"r": RunConfig(peers=2)}


@pytest.mark.parametrize("folder", ["", "a\0b"])
def test_the_folder_has_a_name(folder: str):
    with pytest.raises(UserError, match=r"dir is '.*'; name the folder"):
        ServerConfig(dir=folder, runs=RUN).check()


@pytest.mark.parametrize("name", ["patience_seconds", "call_seconds"])
@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_callers_wait_for_as_long_as_can_be_waited(name: str, seconds: float):
    with pytest.raises(UserError, match=rf"{name} is .*; it must be .* and at most 2592000"):
        Connection(ConnectionConfig(**{"server": "127.0.0.1:1", name: seconds}))


def test_what_runs_have_in_common_may_be_written_once(tmp_path: Path):
    config = tmp_path / "server.yaml"
    config.write_text("runs:\n  one: &own {peers: 2, quorum: 1}\n  two:\n    <<: *own\n    peers: 3\n")
    runs = read_config(config)["runs"]
    assert [(run.peers, run.quorum) for run in runs.values()] == [(2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runs: {r: {peers: 2, qourum: 1}}", "run r: field 'qourum' is unknown; the fields are peers, quorum"),
        ("runs: {r: {quorum: 1}}", "run r: peers is missing"),
        ("runs: {r: {peers: two}}", "run r: peers is 'two'; it must be of type int"),
        ("runs: {r: {peers: true}}", "run r: peers is True; it must be of type int"),
        ("runs: {r: {peers: 2, quorum: 3}}", r"run r: quorum is 3; it must be 1 to peers \(2\)"),
        ("runs: {r: {peers: 2, max_norm: -1}}", "run r: max_norm is -1; it must be above 0"),
        ("runs: {r: {peers: 2, outer_optimizer: lion}}", "run r: outer_optimizer 'lion' is not known"),
        (
            "runs: {r: {peers: 2, outer_optimizer: adam}}",
            "run r: outer_optimizer adam needs outer_optimizer_lr; the default of 0.7 is for sgd only",
        ),
        (
            'runs: {r: {peers: 2, outer_optimizer: sgd, outer_optimizer_lr_schedule: "1:0.1,1:0.7"}}',
            "run r: outer_optimizer_lr_schedule '1:0.1,1:0.7': round 1 comes after round 1",
        ),
        (
            'runs: {r: {peers: 2, rounds: asynchronous, outer_optimizer: sgd, outer_optimizer_lr_schedule: "1:0.1"}}',
            "run r: outer_optimizer_lr_schedule counts rounds of all together",
        ),
        (
            "runs: {r: {peers: 2, outer_optimizer: none, outer_optimizer_nesterov: false}}",
            "run r: outer_optimizer_nesterov: false has no effect with outer_optimizer none",
        ),
        ("runs: {../r: {peers: 2}}", "'../r' cannot be the name of a run"),
        ("runs: {r: {peers: 2, merge_interval: 500}}", "run r: merge_interval needs sync_steps, the steps between two"),
        (
            "runs: {r: {peers: 2, merge_topk: 2}}",
            "run r: merge_topk has no effect without merge_interval; add it or drop",
        ),
        ("runs: {r: {peers: 2, sync_steps: 1, merge_interval: 0}}", "run r: merge_interval is 0; it must be 1 or more"),
        ("runs: {r: {peers: 2, sync_steps: 0}}", "run r: sync_steps is 0; it must be 1 or more"),
        ("runs: {r: {peers: 2, ewma_alpha: 0.1}}", "run r: ewma_alpha has no effect without skip_anomaly"),
        (
            "runs: {r: {peers: 2, reducer: pairwise}}",
            "run r: reducer pairwise does not work in synchronous rounds at a server: pairs .* use linear or gta$",
        ),
        (
            "runs: {r: {peers: 2, reducer: gta, consensus_method: most}}",
            "run r: consensus_method is 'most'; it must be 'sum' or 'count' or None$",
        ),
        ("runs: {r: {peers: 2, consensus_method: sum}}", "run r: consensus_method needs reducer gta; add it or drop"),
        ("runs: {r: {peers: 2, reducer: gta, density: 0}}", "run r: density is 0; it must be above 0 and at most 1"),
        (
            "runs: {r: {peers: 2, rounds: asynchronous, reducer: gta}}",
            "run r: reducer gta does not work in asynchronous rounds at a server: no two .* there; use linear$",
        ),
        (
            "runs: {r: {peers: 2, reducer: median}}",
            "run r: reducer is 'median'; it must be 'linear' or 'gta' or 'pairwise' or None$",
        ),
        ("runs: {r: {peers: 2, clip_pseudo_grad: -1}}", "run r: clip_pseudo_grad is -1; it must be finite and above 0"),
        (
            "runs: {r: {peers: 2, rounds: asynchronous, contributions_per_step: 0}}",
            "run r: contributions_per_step is 0; it must be 1 or more",
        ),
        ("runs: {r: {peers: 2, rounds: now}}", "run r: rounds is now; it must be synchronous or asynchronous"),
        (
            "runs: {r: {peers: 2, step_weights: true, token_weights: true}}",
            "run r: step_weights and token_weights are two weights of one contribution; drop one of them",
        ),
        (
            "runs: {r: {peers: 2, step_weights: true, step_weight_ratio: 0.3}}",
            "run r: step_weight_ratio has no effect without pseudo_gradnorm_reduce and step_weights or token_weights",
        ),
        ("runs: {r: {peers: 2, max_staleness: -1, rounds: asynchronous}}", "run r: max_staleness is -1; it must be 0"),
        ("runs: {r: {peers: 2, rounds: asynchronous, quorum: 1}}", "run r: quorum has no meaning with asynchronous r"),
        (
            "runs: {r: {peers: 2, rounds: asynchronous, skip_anomaly: true, ewma_relative: true}}",
            "run r: ewma_relative needs at least 3 workers: of two that differ",
        ),
        (
            "runs: {r: {peers: 2, rounds: asynchronous, outer_optimizer: sgd, outer_optimizer_nesterov: false}}",
            "run r: asynchronous rounds have delayed Nesterov for an outer optimizer: use outer_optimizer sgd",
        ),
        ("runs: [r]", "runs must be a mapping"),
        ("runs: {r: {peers: 2, grace_seconds: 1.0e+300}}", "run r: grace_seconds is 1e.300; it must be a number of"),
        ("runs: {null: {peers: 2}}", "None cannot be the name of a run; put it in quotes"),
        ("runs: {r: {peers: 2}}\ntls_cert: ''", "tls_cert is empty; name the file, or drop tls_cert"),
        ("runs: {r: {peers: 2}}\nstatus_port: 0\nstatus_host: ''", "status_host is '', which means every address"),
        ("[" * 3000, "it has too many levels"),
        ("bind: 5001\nruns: {r: {peers: 2}}", "bind is 5001; it must be of type str"),
        ("bind: 127.0.0.1\nruns: {r: {peers: 2}}", "bind is '127.0.0.1'; give ADDRESS:PORT"),
        ("bind: 0.0.0.0:5001\nruns: {r: {peers: 2}}", "tls_cert, tls_key, and token_file or tls_client_ca are needed"),
        ("tls_key: k.pem\nruns: {r: {peers: 2}}", "tls_cert and tls_key belong together"),
        ("token_file: none.txt\nruns: {r: {peers: 2}}", "token_file .*none.txt: cannot be read: No such file"),
        ("keep_snapshots: 0\nruns: {r: {peers: 2}}", "keep_snapshots is 0"),
        ("state: memory://x\nruns: {r: {peers: 2}}", "state is 'memory://x', which is gone with this process"),
        ("state: /data\nruns: {r: {peers: 2}}", "state is '/data'; give a URL such as s3://bucket/folder"),
        ("bind: 127.0.0.1:0\nstate: dropbox://x\nruns: {r: {peers: 2}}", "state dropbox://x: .*[Ii]nstall"),
        (
            "bind: 127.0.0.1:0\nstate: nowhere://x\nruns: {r: {peers: 2}}",
            "state nowhere://x: cannot be used: ValueError: Protocol not known",
        ),
        ("status_port: 70000\nruns: {r: {peers: 2}}", "status_port is 70000; it must be 0 to 65535"),
        ("status_host: 0.0.0.0\nruns: {r: {peers: 2}}", "status_host is '0.0.0.0', and there is no status_port"),
        ("{", "not valid YAML: while parsing a flow node"),
        ("runs: {r: {peers: 2, peers: 3}}", "not valid YAML: the key 'peers' is there twice; drop one of them"),
        ("runs: {r: {peers: 2024-13-45}}", "not valid YAML: month must be in 1..12; put the value into quotes"),
        ("- 1", "must be a mapping"),
        ("shards: [host0: 50051, host1: 50051]\nruns: {r: {peers: 2}}", "shards is .*without a blank after the colon"),
        ("runs: {5: {peers: 2}, '5': {peers: 3}}", "runs has names that are the same as text, 5, '5'; change one"),
        ("bind: 127.0.0.1:0", "there is no run; name at least one"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
):
    config = tmp_path / "server.yaml"
    config.write_text(text)
    assert main(["server", "start", "--config", str(config), "--dir", str(tmp_path / "state")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-ext: error: ") and re.search(problem, error), error


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "dir is missing"),
        (["--dir", "d"], "there is no run"),
        (["--dir", "d", "--run", "r"], "run r .*peers is missing"),
        (["--dir", "d", "--peers", "0"], "run default: --peers is 0; it must be 1 to"),
        (["--dir", "d", "--peers", "2", "--quorum", "3"], r"run default: --quorum is 3; it must be 1 to peers \(2\)"),
        (["--dir", "d", "--peers", "2", "--merge-topk", "2"], "--merge-topk has no effect without --merge-interval"),
        (["--dir", "d", "--peers", "2", "--tls-cert", "c"], "--tls-cert and --tls-key belong together; give both"),
        (["--dir", "d", "--peers", "2", "--max-staleness", "2"], "--rounds is synchronous; change that or drop --max"),
        (["--dir", "d", "--peers", "1", "--bind", "10.0.0.1:1"], "which others reach"),
        (["--dir", "d", "--peers", "1", "--failpoint", "lunch"], "--failpoint 'lunch' is not one"),
        (["--dir", "d", "--run", "", "--peers", "1"], "'' cannot be the name of a run"),
        (["--dir", "d", "--peers", "1", "--bind", "a..b:1", "--insecure"], "bind a..b:1: no machine can be called"),
        (["--config", "missing.yaml"], "missing.yaml: cannot be read"),
    ],
)
def test_bad_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
):
    monkeypatch.chdir(tmp_path)
    assert main(["server", "start", *flags]) == 2
    assert re.search(problem, capsys.readouterr().err)


def test_what_a_file_says_keeps_its_name_beside_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "server.yaml"
    config.write_text("runs: {r: {peers: 2, quorum: 3}}\ntls_cert: cert.pem")
    flags = ["--status-port", "-1", "--shard", "1", "--dir", str(tmp_path / "state")]
    assert main(["server", "start", "--config", str(config), *flags]) == 2
    error = capsys.readouterr().err
    for said in ("tls_cert and tls_key belong", "--status-port is -1;", "--shard is 1, and", "run r: quorum is 3;"):
        assert f". {said}" in error, error


@pytest.mark.parametrize("path", ["state/runs", "state/runs/default/journal.jsonl", "state/address"])
def test_a_folder_with_something_else_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
):
    if path == "state/runs":
        (tmp_path / "state").mkdir()
        (tmp_path / path).write_text("")
    else:
        (tmp_path / path).mkdir(parents=True)
    flags = ["--dir", str(tmp_path / "state"), "--peers", "1", "--bind", "127.0.0.1:0"]
    assert main(["server", "start", *flags]) == 2
    said = capsys.readouterr().err
    assert f"dir {tmp_path / 'state'}: {tmp_path / path}" in said and "cannot be used" in said, said


def test_arguments_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]):
    for flags, said in ((["p\udcff"], "PEER is"), (["p", "--reason", "hei\udcdf"], "--reason is")):
        assert main(["server", "evict", "--server", "127.0.0.1:1", *flags]) == 2
        assert f"{said} '{flags[-1]}'".encode("ascii", "backslashreplace").decode() in capsys.readouterr().err


def test_flags_for_a_run_that_the_file_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "server.yaml"
    config.write_text("runs: {r: {peers: 2}}")
    assert main(["server", "start", "--config", str(config), "--quorum", "1"]) == 2
    assert "--quorum" in capsys.readouterr().err


def test_an_open_address_needs_token_and_tls_unless_told_otherwise():
    for bind in ("0.0.0.0:1", "[::]:1", "192.168.0.1:1", "example.org:1", "127.evil.example:1"):
        with pytest.raises(UserError, match="tls_cert, tls_key, and token_file or tls_client_ca are needed"):
            ServerConfig(dir="d", bind=bind, runs=RUN, token_file="t").check()
        with pytest.raises(UserError, match="tls_cert, tls_key, and token_file or tls_client_ca are needed"):
            ServerConfig(dir="d", bind=bind, runs=RUN, tls_cert="c", tls_key="k").check()
        ServerConfig(dir="d", bind=bind, runs=RUN, insecure=True).check()
        ServerConfig(dir="d", bind=bind, runs=RUN, token_file="t", tls_cert="c", tls_key="k").check()
        ServerConfig(dir="d", bind=bind, runs=RUN, tls_client_ca="a", tls_cert="c", tls_key="k").check()
    for bind in ("127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1"):
        ServerConfig(dir="d", bind=bind, runs=RUN).check()


def test_a_peer_does_not_talk_to_another_machine_unencrypted():
    with pytest.raises(UserError, match="without tls_ca everything is sent unencrypted"):
        Connection(ConnectionConfig(server="10.0.0.1:1"))
    Connection(ConnectionConfig(server="10.0.0.1:1", insecure=True)).close()


def test_a_token_that_anybody_guesses_is_refused(tmp_path: Path):
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(UserError, match="must hold at least 16 printable ASCII characters"):
        Connection(ConnectionConfig(server="localhost:1", token_file=str(tmp_path / "token")))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"peer": "a/b"}, "peer is 'a/b'"),
        ({"codec": "gzip"}, "codec 'gzip' is not known; use one of fp32, bf16"),
        ({"agreed": {"codec": "x"}}, "agreed has a field 'codec'"),
        ({"frame_bytes": 8 << 20}, "frame_bytes is 8388608"),
        ({"streams": 0}, "streams must be 1 or more"),
    ],
)
def test_a_bad_client_configuration_is_refused(options: dict, problem: str):
    connection = ConnectionConfig(server="localhost:1")
    with pytest.raises(UserError, match=problem):
        SyncClient(ClientConfig(**{"connection": connection, "run": "r", "peer": "p", **options}), {})


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        ([], "the catalog has 0 tensors"),
        ([TensorSpec(name="a", shape=(1,)), TensorSpec(name="a", shape=(1,))], "tensor 'a' is twice"),
        ([TensorSpec(name="a", shape=(3, 0))], r"tensor 'a' has the shape \(3, 0\)"),
        ([TensorSpec(name="outer:a", shape=(3,))], "'outer:a' cannot be the name"),
        ([TensorSpec(name="a", shape=(3,), owners=(1, 0))], "tensor 'a' has the owners"),
    ],
)
def test_a_bad_catalog_is_refused(specs: list[TensorSpec], problem: str):
    with pytest.raises(Refusal, match=problem):
        Catalog(specs)


@pytest.mark.parametrize("name", ["sync_server_toy.yaml", "spes_server.yaml", "spes_toy_server.yaml"])
def test_the_shipped_configurations_are_good(name: str):
    path = REPOSITORY / "configs" / name
    ServerConfig(**read_config(path)).check()
    assert path.name in (REPOSITORY / "configs" / "README.md").read_text()


def test_the_server_and_the_client_import_no_megatron():
    code = (
        "import sys, megatron_ext.cli.server, megatron_ext.sync_service.server.process\n"
        "import megatron_ext.sync_service.peer.client\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('megatron', 'transformer_engine')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_grpc_one_error_names_what_to_install(tmp_path: Path):
    code = (
        "import sys\nsys.modules['grpc'] = None\nfrom megatron_ext.cli.main import main\n"
        f"sys.exit(main(['server', 'start', '--peers', '1', '--dir', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip install 'grpcio>=1.74' 'protobuf>=" in done.stderr


def test_files_that_are_no_pem_are_named_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    notes = tmp_path / "notes.pem"
    notes.write_text("not a certificate\n")
    assert main(["server", "status", "--server", "127.0.0.1:1", "--tls-ca", str(notes)]) == 2
    assert f"tls_ca {notes}: is not a PEM file" in capsys.readouterr().err
    flags = ["--dir", str(tmp_path / "state"), "--peers", "1", "--bind", "127.0.0.1:0"]
    assert main(["server", "start", *flags, "--tls-cert", str(notes), "--tls-key", str(notes)]) == 2
    assert f"tls_key {notes}: is not a PEM file" in capsys.readouterr().err
    assert main(["server", "status", "--server", "127.0.0.1:port"]) == 2
    assert "server is '127.0.0.1:port'; give ADDRESS:PORT" in capsys.readouterr().err


def test_a_number_may_be_written_without_a_point(tmp_path: Path):
    path = tmp_path / "server.yaml"
    path.write_text("runs: {r: {peers: 2, outer_optimizer: sgd, outer_optimizer_lr: 7e-1, max_norm: 1E3}}")
    run = read_config(path)["runs"]["r"]
    assert (run.outer_optimizer_lr, run.max_norm) == (0.7, 1000.0)
