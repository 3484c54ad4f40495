# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext server start | status | drain | evict | recover | compact`: the sync service."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ext.config_options import in_option_names
from megatron_ext.errors import UserError, combine
from megatron_ext.phrases import as_field

__all__ = ["add_parser", "run_compact", "run_drain", "run_evict", "run_recover", "run_start", "run_status"]

_START = """\
Start a server at which separate jobs (peers) meet in rounds. What it is given by flags replaces what the
file says. Its state is in --dir: started again with the same folder, it resumes, however it ended.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "server", help="the sync service: start it, look at it, end it", description="The sync service."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_start(actions)
    status = actions.add_parser("status", help="show runs, rounds and peers", description="Show runs, rounds, peers.")
    status.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    status.set_defaults(func=run_status)
    drain = actions.add_parser(
        "drain",
        help="finish the open round, then end the server",
        description="Finish the open round, let the peers fetch it, end the server. Peers wait for it to come back.",
    )
    drain.set_defaults(func=run_drain)
    evict = actions.add_parser(
        "evict",
        help="end a peer's membership",
        description="End a peer's membership. Its process is refused from then on; a new process may register again.",
    )
    evict.add_argument("peer", metavar="PEER", help="the peer's name")
    evict.add_argument("--run", metavar="RUN", help="the run (default: the only one)")
    evict.add_argument("--reason", default="", metavar="TEXT", help="goes into the journal and to the peer")
    evict.set_defaults(func=run_evict)
    for action in (status, drain, evict):
        _add_connection(action)
    _add_recover(actions)
    _add_compact(actions)


def _add_start(actions: Any) -> None:
    start = actions.add_parser(
        "start", help="start a server", description=_START, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    start.add_argument("--config", type=Path, metavar="FILE", help="YAML file; see configs/sync_server_toy.yaml")
    start.add_argument("--dir", metavar="DIR", help="folder of the durable state")
    start.add_argument("--state", metavar="URL", help="copy of that state for another machine, such as s3://bucket/x")
    start.add_argument("--bind", metavar="HOST:PORT", help="where to listen (default: 127.0.0.1:50051)")
    start.add_argument("--token-file", metavar="FILE", help="file with the token that every caller has to show")
    start.add_argument("--tls-cert", metavar="FILE", help="the server's certificate chain (PEM); switches TLS on")
    start.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM)")
    start.add_argument("--tls-client-ca", metavar="FILE", help="who signs the callers' certificates (PEM; mutual TLS)")
    start.add_argument(
        "--insecure", action="store_true", default=None, help="listen where others reach it without token and TLS"
    )
    start.add_argument(
        "--status-port", type=int, metavar="PORT", help="port of a status page for browsers and Prometheus (HTTP)"
    )
    start.add_argument(
        "--shard", type=int, metavar="K", help="which of the shards in --config this is, from 0 (default: the first)"
    )
    start.add_argument("--tls-ca", metavar="FILE", help="who signed the other shards' certificates (PEM)")
    start.add_argument(
        "--shard-secret-file", metavar="FILE", help="file with the secret of the shards, which no peer has"
    )
    start.add_argument("--status-host", metavar="HOST", help="address of the status page (default: 127.0.0.1)")
    run = start.add_argument_group("one run, when --config names none")
    run.add_argument("--run", metavar="NAME", help="its name (default: default)")
    run.add_argument("--peers", type=int, metavar="N", help="how many peers meet")
    run.add_argument("--quorum", type=int, metavar="N", help="uploads without which no round closes (default: all)")
    run.add_argument("--grace-seconds", type=float, metavar="S", help="how long slow peers are awaited after that")
    run.add_argument("--rounds", metavar="KIND", help="synchronous (default), or asynchronous: no peer waits")
    run.add_argument(
        "--contributions-per-step", type=int, metavar="N", help="asynchronous: that make up an outer step (peers)"
    )
    run.add_argument("--step-weights", action="store_true", default=None, help="weight peers by their steps")
    run.add_argument("--max-staleness", type=int, metavar="K", help="asynchronous: rounds since a contribution began")
    run.add_argument("--max-norm", type=float, metavar="X", help="larger pseudo-gradients do not count")
    run.add_argument("--outer-optimizer", metavar="NAME", help="none (default, FedAvg), sgd (DiLoCo), adam, ...")
    run.add_argument("--outer-optimizer-lr", type=float, metavar="X", help="default: 0.7 for sgd")
    run.add_argument("--outer-optimizer-momentum", type=float, metavar="X", help="of sgd (default: 0.9)")
    run.add_argument("--sync-steps", type=int, metavar="H", help="steps between two rounds; merging needs them")
    run.add_argument("--merge-interval", type=int, metavar="M", help="steps between two merges of experts (SPES)")
    run.add_argument("--merge-alpha-start", type=float, metavar="X", help="how much experts merge at first (0.01)")
    run.add_argument("--merge-decay-steps", type=int, metavar="T", help="steps in which that goes down to 0 (10000)")
    run.add_argument("--merge-topk", type=int, metavar="K", help="from how many experts each takes over (4)")
    # For tests: dies at a place of the code as if the power had gone.
    start.add_argument("--failpoint", action="append", default=[], help=argparse.SUPPRESS)
    start.set_defaults(func=run_start, of_unknown=_only_in_a_file)


def _only_in_a_file(word: str) -> str | None:
    """Return where a setting of a run is given that has no option; None for what is none."""
    from megatron_ext.sync_service.rounds.config import RunConfig

    option = word.partition("=")[0]
    if (field := as_field(option)) not in RunConfig.__dataclass_fields__:
        return None
    return f"{option} is given as {field} in the file of --config, under runs"


def _add_recover(actions: Any) -> None:
    recover = actions.add_parser(
        "recover",
        help="rebuild a journal that is gone or has lost lines",
        description="Rebuild the journal of a run, that is gone or has lost lines, from the newest snapshot. "
        "The server must not run. The former journal is kept next to the new one.",
    )
    _add_folder(recover, "recovered")
    recover.set_defaults(func=run_recover)


def _add_compact(actions: Any) -> None:
    from megatron_ext.sync_service.rounds.history import KEPT_ROUNDS

    compact = actions.add_parser(
        "compact",
        help="shorten a journal that has grown long",
        description="Drop the lines of a run's journal from before its newest rounds, in whose place comes the state "
        "of the run from the newest snapshot. The server must not run. The former journal is kept, compressed.",
    )
    _add_folder(compact, "shortened")
    stay = f"newest rounds whose lines stay ({KEPT_ROUNDS}: as many as a server remembers)"
    compact.add_argument("--rounds", type=int, default=KEPT_ROUNDS, metavar="N", help=stay)
    compact.set_defaults(func=run_compact)


def _add_folder(parser: argparse.ArgumentParser, done: str) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="the server's folder, or DIR/runs/RUN")
    parser.add_argument("--run", metavar="RUN", help="the run (default: all of the folder)")
    parser.add_argument("--state", metavar="URL", help=f"the copy of the server's state, to be {done} together")
    parser.add_argument("--dry-run", action="store_true", help="print the planned changes, and change nothing")


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (default: 127.0.0.1:50051)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the server's token")
    parser.add_argument("--tls-ca", metavar="FILE", help="who signed the server's certificate (PEM); switches TLS on")
    parser.add_argument("--tls-cert", metavar="FILE", help="own certificate (PEM; mutual TLS)")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="talk to another machine without TLS")


def run_start(args: argparse.Namespace) -> int:
    """Serve until the end.

    Raises:
        UserError: the configuration cannot be used.
    """
    import logging

    from megatron_ext.sync_service.rounds.config import RunConfig
    from megatron_ext.sync_service.server.config import ServerConfig, read_config, run_config
    from megatron_ext.sync_service.server.process import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given = {} if args.config is None else read_config(args.config)
    tls = ("token_file", "tls_cert", "tls_key", "tls_client_ca", "tls_ca", "shard_secret_file", "insecure")
    flags = ("dir", "state", "bind", "shard", *tls, "status_port", "status_host")
    given |= {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
    of_run = [entry.name for entry in fields(RunConfig) if hasattr(args, entry.name)]
    run = {name: getattr(args, name) for name in of_run if getattr(args, name) is not None}
    if run or args.run is not None:
        if given.get("runs"):
            flag = next(iter(run), "run").replace("_", "-")
            raise UserError(f"--{flag}: {args.config} names runs already; change the file, or drop the flag")
        name = "default" if args.run is None else args.run
        given["runs"] = {name: run_config(run, f"run {name} (--peers N ...)")}
    if "dir" not in given:
        raise UserError(
            "dir is missing: where should the server keep its state? Give --dir DIR, or dir in --config FILE"
        )
    shards, shard = given.get("shards", []), given.get("shard", 0)
    if "bind" not in given and 0 <= shard < len(shards):
        given["bind"] = str(shards[shard])
    config = ServerConfig(**given)
    # Without a file everything has been given by flags, or is missing as a flag.
    by_flag = [name for name in (*flags, *of_run) if args.config is None or getattr(args, name) is not None]
    if problems := [in_option_names(problem, by_flag) for problem in config.problems()]:
        raise combine(problems, "server configuration")
    return serve(config, args.failpoint)


def run_status(args: argparse.Namespace) -> int:
    """Print the status.

    Raises:
        UserError: the server does not answer.
    """
    content = _status(args)
    if args.json:
        print(json.dumps(content, indent=2))
        return 0
    for run in content["runs"]:
        newest = "none yet" if run["newest_round"] is None else f"{run['newest_round']} ({run['digest'][:12]})"
        print(f"run {run['run']}: newest round {newest}; {run['waiting_for']}")
        if run["problem"]:
            print(f"  PROBLEM: {run['problem']}")
        for shard in run["shards"]:
            print(f"  shard {shard['shard']} at {shard['address']}: {'PROBLEM' if shard['problem'] else 'here'}")
        print(f"  {len(run['peers'])} of {run['places']} peers, quorum {run['quorum']}")
        for peer in run["peers"]:
            state, missed = "awaited" if peer["awaited"] else "absent", "missed"
            if run["asynchronous"] and run["newest_round"] is not None:
                state, missed = "training", "not counted"  # no peer is awaited
            if peer["uploaded"]:
                state = "uploaded"
            sent = f"{peer['bytes_uploaded'] / 1e6:.1f} MB"
            print(f"  {peer['index']:>3}  {peer['peer']:<24} {state:<9} {sent:>10}  {missed} {peer['missed']}")
        for peer, reason in run["rejected"].items():
            print(f"  round {run['newest_round']} did not count {peer}: {reason}")
    return 0


def run_drain(args: argparse.Namespace) -> int:
    """Ask the server to end.

    Raises:
        UserError: the server does not answer.
    """
    print(f"draining; {_call(args, 'Drain', {}).message}")
    print("peers that are gone are awaited for 30 s; SIGTERM ends the server at once, and nothing committed is lost")
    return 0


def run_evict(args: argparse.Namespace) -> int:
    """Evict a peer.

    Raises:
        UserError: the server refuses.
    """
    for name in ("peer", "run", "reason"):
        try:
            (getattr(args, name) or "").encode()
        except UnicodeEncodeError:
            flag = name.upper() if name == "peer" else f"--{name}"
            raise UserError(f"{flag} is {getattr(args, name)!r}, which is not text in UTF-8; write it so") from None
    run = args.run
    if run is None:
        names = [entry["run"] for entry in _status(args)["runs"]]
        if len(names) != 1:
            raise UserError(f"--run is missing; the server has the runs {', '.join(names)}")
        (run,) = names
    _call(args, "Evict", {"run": run, "peer": args.peer, "reason": args.reason})
    print(f"evicted {args.peer} from run {run}")
    return 0


def run_recover(args: argparse.Namespace) -> int:
    """Rebuild journals.

    Raises:
        UserError: one cannot be rebuilt.
    """
    from megatron_ext.sync_service.server.recovery import recover

    for line in recover(args.dir, run=args.run, url=args.state, dry_run=args.dry_run):
        print(line, flush=True)
    return 0


def run_compact(args: argparse.Namespace) -> int:
    """Shorten journals.

    Raises:
        UserError: one cannot be shortened.
    """
    from megatron_ext.sync_service.server.compaction import compact

    for line in compact(args.dir, run=args.run, url=args.state, rounds=args.rounds, dry_run=args.dry_run):
        print(line, flush=True)
    return 0


def _status(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_ext.sync_service.protocol.field_checks import Malformed
    from megatron_ext.sync_service.protocol.status_reply import read_status

    try:
        return read_status(_call(args, "Status", {}))
    except Malformed as error:
        raise UserError(
            f"server {args.server}: its answer to Status is none ({error}); install the same release on both sides"
        ) from error


def _call(args: argparse.Namespace, method: str, fields: dict[str, str]) -> Any:
    from megatron_ext.sync_service.channel.connection import Connection, ConnectionConfig
    from megatron_ext.sync_service.protocol.protocol import pb2

    config = ConnectionConfig(
        server=args.server,
        token_file=args.token_file,
        tls_ca=args.tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        insecure=args.insecure,
        patience_seconds=5.0,
        call_seconds=10.0,
    )
    connection = Connection(config)
    try:
        return connection.call(method, getattr(pb2, f"{method}Request")(**fields))
    finally:
        connection.close()
