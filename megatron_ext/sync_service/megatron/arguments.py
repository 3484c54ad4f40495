# SPDX-License-Identifier: Apache-2.0
"""The options of a job that is a peer: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config_options import FromArgs, in_option_names, one_of
from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install_extra
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.options import refusals
from megatron_ext.outer.codecs.all_codecs import CODECS, EXACT_CODEC
from megatron_ext.outer.places import Where, place_problems
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.phrases import as_option
from megatron_ext.sync_service.channel.address import is_loopback, split_address
from megatron_ext.sync_service.protocol.durations import (
    HEARTBEAT_SECONDS,
    LONGEST_HEARTBEAT_SECONDS,
    LONGEST_SECONDS,
    can_be_waited,
)
from megatron_ext.sync_service.protocol.names import NAME
from megatron_ext.sync_service.rounds.members import MOST_PEERS

if TYPE_CHECKING:
    from megatron_ext.sync_service.channel.connection import ConnectionConfig

__all__ = ["SyncServiceConfig", "argument_problems", "connection_of", "file_problems", "interval_of", "notices"]

_MOST_STEPS = 1_000_000_000
"""Of an interval: more is a mistake in typing, with which the run would be created."""

_MOST_STREAMS = 1024

_CONNECTION = {
    "server": "--sync-service",
    **{
        name: as_option(f"sync_service_{name}")
        for name in ("token_file", "tls_ca", "tls_cert", "tls_key", "patience_seconds")
    },
}
"""What the fields of a connection are called here."""


@dataclass(frozen=True, kw_only=True)
class SyncServiceConfig(FromArgs):
    """This job is a peer: it trains apart from other jobs and meets them every few steps at a sync service."""

    sync_service: str | None = None
    """HOST:PORT of a sync service (megatron-ext server start). This job then is one of its run's peers, which train on
    parts of the samples of their own and meet in rounds; they may have different parallel layouts."""

    sync_service_run: str | None = None
    """Name of the run at the server."""

    sync_service_peer: str | None = None
    """This job's name, its own among the peers; kept when the job is started again."""

    sync_service_peers: int | None = None
    """How many peers the run has; the samples are cut into that many parts. The server's own number."""

    sync_service_interval: int | None = None
    """Interval H: completed steps between two rounds. This or --sync-service-interval-seconds."""

    sync_service_interval_seconds: float | None = None
    """Time-based rounds (A-EDiT): a round is due when a step ends at least this many seconds after the last one,
    however many steps that were, so that peers of different speeds do not wait for each other's steps."""

    sync_service_delay: int = 0
    """Apply a round this many steps after the end of its interval, and continue training while it is made: the values
    are then the round's plus this job's own steps since. Below --sync-service-interval; 0 waits."""

    sync_service_index: int | None = None
    """Which part of the samples is this peer's, from 0; the lowest free one unless given."""

    sync_service_codec: str = one_of("--sync-service-codec", EXACT_CODEC, CODECS.names)
    """How contributions travel. All but fp32 lose something, which is sent along with the next contribution, and
    saved in checkpoints until then."""

    sync_service_token_file: str | None = None
    """File with the server's token, on every node."""

    sync_service_tls_ca: str | None = None
    """PEM file with the authority that has signed the server's certificate, on every node; switches TLS on."""

    sync_service_tls_cert: str | None = None
    """PEM file with this job's own certificate, where the server asks for one."""

    sync_service_tls_key: str | None = None
    """PEM file with its key."""

    sync_service_insecure: bool = False
    """Talk to a server on another machine without TLS."""

    sync_service_streams: int = 2
    """Parallel streams of an upload or download, per rank. The server holds some megabytes for each."""

    sync_service_round_seconds: float = 3600.0
    """How long a round is awaited before this job gives up."""

    sync_service_patience_seconds: float = 300.0
    """How long a call is tried again while the server is away."""

    sync_service_heartbeat_seconds: float = HEARTBEAT_SECONDS
    """How often this job says that it is alive, so that no other one gets its place by mistake; 0 for never. When three
    have failed to come, rounds that have their quorum close without it, and a job that is started in its place waits no
    longer."""

    sync_service_take_over: bool = False
    """Take this peer's place though another job that is alive has it, which ends."""

    sync_service_continue_run: bool = False
    """Continue the run that the server has though this peer's place has trained on other data; refused otherwise."""

    def problems(self) -> list[str]:
        """Return the problems of the values, one sentence each."""
        if self.sync_service is None:
            given = [flag for flag, value in self.by_flag().items() if value != SyncServiceConfig().by_flag()[flag]]
            return [f"{flag} has no effect without --sync-service; add it or drop the option" for flag in given]
        needed = ("--sync-service-run", "--sync-service-peer", "--sync-service-peers")
        found = [f"--sync-service needs {flag}; add it" for flag in needed if self.by_flag()[flag] is None]
        if self.sync_service_interval is None and self.sync_service_interval_seconds is None:
            found.append("--sync-service needs --sync-service-interval or --sync-service-interval-seconds; add one")
        if self.sync_service_interval is not None and self.sync_service_interval_seconds is not None:
            found.append(
                "--sync-service-interval counts steps and --sync-service-interval-seconds time; drop one of them"
            )
        address = split_address(self.sync_service)
        if address is None:
            found.append(f"--sync-service is {self.sync_service!r}; give HOST:PORT, with a port of 1 to 65535")
        elif self.sync_service_tls_ca is None and not is_loopback(address[0]) and not self.sync_service_insecure:
            found.append(
                f"--sync-service {self.sync_service} is on another machine, and without --sync-service-tls-ca "
                "everything goes there unencrypted; give it, or say --sync-service-insecure"
            )
        for flag in ("--sync-service-run", "--sync-service-peer"):
            name = self.by_flag()[flag]
            if name is not None and not NAME.fullmatch(name):
                found.append(f"{flag} is {name!r}; use up to 64 letters, digits, '.', '_' and '-'")
        for flag, most in (
            ("--sync-service-peers", MOST_PEERS),
            ("--sync-service-interval", _MOST_STEPS),
            ("--sync-service-streams", _MOST_STREAMS),
        ):
            number = self.by_flag()[flag]
            if number is not None and not 1 <= number <= most:
                found.append(f"{flag} is {number}; it must be 1 to {most}")
        if self.sync_service_index is not None and not 0 <= self.sync_service_index < (self.sync_service_peers or 1):
            found.append(
                f"--sync-service-index is {self.sync_service_index}; it must be 0 to --sync-service-peers minus 1"
            )
        found += self._delay_problems()
        refused = [
            place_problems("--sync-service-codec", CODECS, self.sync_service_codec, place)
            for place in (Where.SERVER, Where.ASYNCHRONOUS)
        ]
        if all(refused):  # the server refuses what works in one kind of rounds alone
            found += refused[0]
        seconds = ("--sync-service-interval-seconds", "--sync-service-round-seconds", "--sync-service-patience-seconds")
        for flag in seconds:
            value = self.by_flag()[flag]
            if value is not None and not can_be_waited(value):
                found.append(f"{flag} is {value}; it must be above 0 and at most {LONGEST_SECONDS:.0f} (a month)")
        if not 0 <= self.sync_service_heartbeat_seconds <= LONGEST_HEARTBEAT_SECONDS:
            found.append(
                f"--sync-service-heartbeat-seconds is {self.sync_service_heartbeat_seconds}; it must be 0 to "
                f"{LONGEST_HEARTBEAT_SECONDS:g}"
            )
        return found

    def _delay_problems(self) -> list[str]:
        """Return why rounds cannot be applied so much later."""
        delay, interval = self.sync_service_delay, self.sync_service_interval
        if delay < 0:
            return [f"--sync-service-delay is {delay}; it must be 0 or more"]
        if delay and self.sync_service_interval_seconds is not None:
            return [
                "--sync-service-delay with --sync-service-interval-seconds: a round may be due before the last one is "
                "applied; use --sync-service-interval"
            ]
        if delay and interval is not None and delay >= interval > 0:
            return [
                f"--sync-service-delay is {delay} and --sync-service-interval {interval}; the delay must be below the "
                "interval, so that a round is applied before the next one begins"
            ]
        return []


def interval_of(options: Any) -> str:
    """Return the interval in words, as peers compare it.

    Args:
        options: Megatron's argument namespace, or the config.
    """
    seconds = options.sync_service_interval_seconds
    return str(options.sync_service_interval) if seconds is None else f"{seconds:g} seconds"


def argument_problems(args: Any, feature: str) -> list[str]:
    """Return the problems, one sentence each.

    Args:
        args: Megatron's argument namespace.
        feature: the name of the sync service in the table of options.
    """
    config = SyncServiceConfig.from_args(args)
    problems = config.problems()
    if config.sync_service is None:
        return problems
    if not problems and importlib.util.find_spec("grpc") is not None:
        problems += file_problems(config)
    if importlib.util.find_spec("grpc") is None:
        problems.append(
            f"--sync-service needs the packages grpcio and protobuf; install them with: {pip_install_extra('sync')}"
        )
    if args.use_local_sgd and args.local_sgd_workers != 1:
        problems += _worker_problems(args, config)
    return problems + refusals(args, feature)


def connection_of(config: SyncServiceConfig) -> "ConnectionConfig":
    """Return how the server is reached, for options without problems."""
    # It needs gRPC, which jobs that are no peers may not have.
    from megatron_ext.sync_service.channel.connection import ConnectionConfig

    assert config.sync_service is not None
    return ConnectionConfig(
        server=config.sync_service,
        token_file=config.sync_service_token_file,
        tls_ca=config.sync_service_tls_ca,
        tls_cert=config.sync_service_tls_cert,
        tls_key=config.sync_service_tls_key,
        insecure=config.sync_service_insecure,
        patience_seconds=config.sync_service_patience_seconds,
    )


def file_problems(config: SyncServiceConfig) -> list[str]:
    """Return the problems of token and certificates, which are better said before a large model is built."""
    from megatron_ext.sync_service.channel.connection import Connection

    try:
        Connection(connection_of(config)).check_files()
    except UserError as error:
        said = in_option_names(str(error), (), _CONNECTION)
        return [said if said != str(error) else f"--sync-service: {error}"]
    return []


def _worker_problems(args: Any, config: SyncServiceConfig) -> list[str]:
    """Return why the peer's rounds would find workers inside the job that differ."""
    problems = []
    if config.sync_service_delay:
        problems.append(
            "--sync-service-delay with --use-local-sgd: a round would be applied where the workers inside the job "
            "stand apart; drop one of them"
        )
    if config.sync_service_interval_seconds is not None:
        problems.append(
            "--sync-service-interval-seconds with --use-local-sgd: the peer's rounds have to fall on rounds of its "
            "workers, which are counted in steps; use --sync-service-interval"
        )
    streaming, gta = StreamingConfig.from_args(args), GTAConfig.from_args(args)
    # 0 and None are reported elsewhere.
    inside = args.local_sgd_sync_interval or 1
    for flag, steps in (
        ("--sync-service-interval", config.sync_service_interval or 0),
        ("--local-sgd-warmup-steps", args.local_sgd_warmup_steps),
    ):
        if inside > 0 and steps % inside:
            problems.append(
                f"{flag} is {steps}, which is not a multiple of --local-sgd-sync-interval {inside}: the peer's rounds "
                "have to fall on rounds of its workers; change one of them"
            )
    differ = {
        "streaming (the --local-sgd-fragment options)": streaming.active and not streaming.eager,
        "--local-sgd-eager-updates": streaming.eager,
        "--local-sgd-sync-in-forward": args.local_sgd_sync_in_forward,
        f"--local-sgd-pseudo-grad-reducer {gta.reducer}": gta.in_pairs,
    }
    return problems + [
        f"{option} leaves workers with different weights after a round, which a peer cannot have; drop it, or "
        "--sync-service"
        for option, given in differ.items()
        if given
    ]


def notices(args: Any) -> list[str]:
    """Return what was chosen, and what may surprise, one line each; the options are known to be good."""
    config = SyncServiceConfig.from_args(args)
    interval, by_time = config.sync_service_interval or 1, config.sync_service_interval_seconds is not None
    unit = "" if by_time else " steps"
    lines = [
        f"sync service: peer {config.sync_service_peer!r} of run {config.sync_service_run!r} at {config.sync_service}, "
        f"one of {config.sync_service_peers}, a round every {interval_of(config)}{unit}, "
        f"codec {config.sync_service_codec}"
    ]
    if config.sync_service_delay:
        lines.append(
            f"sync service: training continues while a round is made, which is applied {config.sync_service_delay} "
            "steps after the end of its interval"
        )
    if args.train_iters is not None and not by_time and args.train_iters % interval:
        lines.append(
            f"sync service: --train-iters {args.train_iters} ends {args.train_iters % interval} steps after a round; "
            "the peers end with weights of their own"
        )
    return lines
