# SPDX-License-Identifier: Apache-2.0
"""What a run keeps on the disk, and its state in memory, which are always the same.

    DIR/runs/RUN/journal.jsonl                       what has happened
    DIR/runs/RUN/snapshots/round-N.safetensors       the values of the newest rounds
    DIR/runs/RUN/spool/round-N/PEER.SALT.frames      contributions to the open round

A round is committed by its line in the journal, which is written after the snapshot has its name, and before anyone is
told. Whatever else a killed server has left is finished, repeated or removed by the next one, by the rule that
`evidence` states.
"""

from __future__ import annotations

import logging
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.outer.codecs.all_codecs import build_codec
from megatron_ext.sync_service.disk.durable import sync_path
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.protocol import DIGEST_PROTOCOL, PROTOCOL_VERSION
from megatron_ext.sync_service.protocol.report import INTERVAL
from megatron_ext.sync_service.rounds.asynchronous import AsynchronousState
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.evidence import check_beginning, check_start, state_after
from megatron_ext.sync_service.rounds.history import History
from megatron_ext.sync_service.rounds.journal import Event, Journal, read_whole_journal
from megatron_ext.sync_service.rounds.room import check_room
from megatron_ext.sync_service.rounds.round import RunState
from megatron_ext.sync_service.rounds.run_record import RunRecord
from megatron_ext.sync_service.rounds.server_commands import compact_command
from megatron_ext.sync_service.shards.remote import RemoteState
from megatron_ext.sync_service.shards.shard import Shard
from megatron_ext.sync_service.shards.sharding import assign, part_of
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.guards import Guards

__all__ = ["RunStore"]

log = logging.getLogger(__name__)

_LONG_JOURNAL = 256 << 20
"""Bytes of a journal from which on a start, which reads all of it, says how it gets shorter."""

_ROOM_BYTES, _ROOM_BYTES_OF_PEER = 1024, 512
"""Of what is not in the state yet when a round is made, in its snapshot's record."""


class RunStore:
    """The durable state of a run. Not for several threads at once."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        folder: Path,
        keep_snapshots: int,
        remote: RemoteState | None = None,
        failpoints: Failpoints | None = None,
        *,
        shards: int = 1,
    ) -> None:
        """Open the folder and resume from what is there.

        Args:
            name: the run id.
            config: of the run.
            folder: where the state is; made when it is not there.
            keep_snapshots: how many committed rounds stay on the disk.
            remote: a copy of it elsewhere, to resume from and to keep up to date.
            failpoints: where to die in tests.
            shards: how many servers have parts of the values, this one among them.

        Raises:
            UserError: the state is damaged or was made with another configuration.
        """
        self._name = name
        self._config = config
        self._shards = shards
        self._folder = folder
        self._keep = keep_snapshots
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, *list(folder.parents)[:2]):
            sync_path(parent)
        self._remote = remote
        if remote is not None:
            try:
                remote.meet(folder)
            except OSError as error:
                raise UserError(f"run {name}: {error}") from error
        path = folder / "journal.jsonl"
        content = read_whole_journal(path)
        check_beginning(name, folder, content)
        kind = AsynchronousState if config.is_asynchronous else RunState
        self.state: RunState = state_after(name, folder, content, kind(config.policy))
        self.history = History()
        for event in content.events:
            self.history.apply(event)
        self.state.await_everybody()
        began_with = self.state.protocol or 0
        if self.state.config is not None and not DIGEST_PROTOCOL <= began_with <= PROTOCOL_VERSION:
            raise UserError(
                f"run {name}: it was started by a release of megatron_ext whose peers speak another protocol than "
                f"{DIGEST_PROTOCOL} ({self.state.protocol or 'an earlier one'}), with other digests of values; end it "
                "with that release, or start a new run under another name from a peer's checkpoint"
            )
        if self.state.config is not None and self.state.places != config.peers:
            raise UserError(
                f"run {name}: peers is {config.peers}, but the run was started with {self.state.places}, by which its "
                "data are cut; give the same number, or start a new run under another name"
            )
        if self.state.config is not None and self.state.rounds != config.rounds:
            raise UserError(
                f"run {name}: rounds is {config.rounds}, but the run was started with {self.state.rounds}; give the "
                "same, or start a new run under another name"
            )
        interval = (self.state.config or {}).get(INTERVAL)
        if config.sync_steps is not None and interval not in (None, str(config.sync_steps)):
            raise UserError(
                f"run {name}: sync_steps is {config.sync_steps}, but the run was started with peers whose {INTERVAL} "
                f"is {interval}; give that, or start a new run under another name"
            )
        kept = _kept_states(config)
        if self.state.kept_states is not None and self.state.kept_states != kept:
            name_of, before = next((key, value) for key, value in self.state.kept_states.items() if value != kept[key])
            raise UserError(
                f"run {name}: {name_of} is {kept[name_of]}, but the run was started with {before}, on which the states "
                "that it keeps depend; give the same, or start a new run under another name"
            )
        begun_with = 1 if self.state.sharding is None else self.state.sharding["shards"]
        if self.state.config is not None and begun_with != shards:
            raise UserError(
                f"run {name}: there are {shards} shards, but the run was started with {begun_with}, among which its "
                "values are split; give as many, or start a new run under another name"
            )
        made = check_start(name, folder, keep_snapshots, content.whole, self.state)
        self._journal = Journal(path, None if remote is None else remote.append, content)
        self._round_begins = self._journal.position[0] - content.grown
        if len(content.whole) > _LONG_JOURNAL:
            log.warning(
                "run %s: its journal has %d MiB, which every start reads; with the server stopped, shorten it with: %s",
                *(name, len(content.whole) >> 20, compact_command(folder, None if remote is None else remote.url)),
            )
        self._journal.events.clear()
        self.shard = Shard(config, folder, keep_snapshots, failpoints or Failpoints())
        if made is not None:
            self._commit_made(made)
        self._catalog: Catalog | None = None
        if self.state.config is not None:
            self._open(Catalog.from_json(self.state.catalog))
        self.shard.recover(self.state.open_round)
        try:
            # What the guards have learned must fit, which nobody wants to hear only when the next round is made.
            self.guards()
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None
        self._recover_spool()
        self.record(
            {
                "event": "started",
                "peers": config.peers,
                "quorum": config.policy.quorum,
                "outer_optimizer": config.outer_optimizer,
                "outer_optimizer_lr": config.outer.learning_rate,
                "outer_optimizer_momentum": config.outer.momentum,
            }
        )

    @property
    def catalog(self) -> Catalog:
        """The tensors of the run, whose first peer has registered."""
        assert self._catalog is not None
        return self._catalog

    @property
    def agreed(self) -> dict[str, str]:
        """What is the same for all peers of the run, whose first one has registered."""
        assert self.state.config is not None
        return self.state.config

    @property
    def run_id(self) -> str:
        """What tells the run from others of its name, where shards have to know; empty before it has begun."""
        return "" if self.state.sharding is None else str(self.state.sharding["id"])

    @property
    def shard_of(self) -> tuple[int, ...]:
        """Which shard has a tensor, in the order of the catalog; the run has begun."""
        return (0,) * len(self.catalog) if self.state.sharding is None else tuple(self.state.sharding["of"])

    def guards(self) -> Guards | None:
        """Return what decides over the peers of the open round, with what was learned so far; None for all alike.

        Raises:
            UserError: it was learned with another configuration.
        """
        if self._catalog is None or not self._config.judges(self._catalog):
            return None
        newest = self.shard.snapshots.get(self.state.open_round - 1)
        state = None if newest is None else newest.metadata.get("guards")
        return Guards(self._config.penalty, self._catalog, self._config.peers, state)

    def record(self, event: Event) -> None:
        """Let an event happen: on the disk first, then here.

        Raises:
            OSError: it could not be written, and has not happened.
        """
        event = self._journal.append(event)
        self.state.apply(event)
        self.history.apply(event)
        if event["event"] == "committed":
            self._round_begins = self._journal.position[0]
        if event["event"] != "created":
            told = {key: value for key, value in event.items() if key not in ("event", "outer_scalars", "time")}
            log.info("run %s: %s %s", self._name, event["event"], told)

    def check_journal(self) -> None:
        """Check that the journal takes a further registration.

        Raises:
            Refusal: it has grown too much since the newest round.
        """
        self._config.limits.check_journal(self._journal.position[0] - self._round_begins)

    def create(self, config: dict[str, str], catalog: Catalog) -> None:
        """Let the run begin with what its first peer says that all peers have in common.

        Raises:
            Refusal: there is not something for every shard, or the disk has no room for a round.
        """
        event: dict[str, Any] = {"event": "created", "config": config, "catalog": catalog.as_json()}
        here = catalog
        if self._shards > 1:
            shard_of = assign(catalog, self._shards)
            event["sharding"] = {"id": uuid.uuid4().hex, "shards": self._shards, "of": shard_of}
            here = part_of(catalog, shard_of, 0)
        check_room(self._folder, self._config, here, config["codec"], self._keep)
        also = {"rounds": self._config.rounds, "kept_states": _kept_states(self._config)}
        self.record({**event, "protocol": PROTOCOL_VERSION, "peers": self.state.policy.peers, **also})
        self._open(catalog)

    def drop(self, peer: str, event: Event) -> None:
        """Let an event happen that ends a membership, and forget what does not count of its peer."""
        self.record(event)
        if peer not in self.state.uploaded and peer not in (self.state.closing or ()):
            self.shard.spool.discard(peer)

    def run_record(self, committed: Event) -> RunRecord:
        """Return what the snapshot of the open round is to say of the run.

        Args:
            committed: the event that commits it.
        """
        nbytes, crc = self._journal.position
        return RunRecord(committed=committed, before=self.state.as_json(), journal_bytes=nbytes, journal_crc=crc)

    @property
    def record_bytes(self) -> int:
        """About how long the record of the open round will be, rather too much."""
        # Beside the state: peers that come meanwhile, and what is said of each; places of tensors that are kept.
        more = _ROOM_BYTES + _ROOM_BYTES_OF_PEER * self.state.places + 8 * len(self.catalog)
        return len(self.run_record({}).to_bytes()) + more

    def copy_snapshot(self, number: int) -> None:
        """Bring the snapshot of a round that is about to be committed to where the copy of this state is.

        Raises:
            OSError: it could not be written there.
        """
        if self._remote is not None:
            self._remote.put_snapshot(self.shard.snapshot_path(number))

    def commit(self, event: Event, snapshot: Snapshot) -> None:
        """Let the event happen that commits the open round, and open the next one."""
        self.record(event)
        # The round is there for everybody now, whether what is not needed any more can be removed or not.
        for tidy in (partial(self.shard.committed, event["round"], snapshot), partial(self._forget_uploads, event)):
            try:
                tidy()
            except OSError as error:
                log.warning("run %s: what round %d does not need stays for now: %s", self._name, event["round"], error)
        if self._remote is not None:
            self._remote.drop_snapshots({snapshot_name(number) for number in self.shard.snapshots})

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _forget_uploads(self, event: Event) -> None:
        if self._config.is_asynchronous and event["round"] > 0:
            for peer in (*event["contributors"], *event["rejected"]):
                self.shard.spool.discard(peer)
        else:
            self.shard.spool.open_round(self.state.open_round)

    def _commit_made(self, made: RunRecord) -> None:
        """Commit the open round, whose snapshot a former server has left, as it is."""
        try:
            self.copy_snapshot(made.number)
        except OSError as error:
            raise UserError(f"run {self._name}: {error}") from error
        log.info("run %s: round %d was made, but is not in the journal; it is committed now", self._name, made.number)
        self.record(made.committed)

    def _open(self, catalog: Catalog) -> None:
        self._catalog = catalog
        codec = self.agreed["codec"]
        try:
            build_codec(codec)  # of a package that may be gone since
        except UserError as error:
            raise UserError(f"run {self._name}: its peers' {error}, or install the package that has it") from error
        self.shard.open(part_of(catalog, self.shard_of, 0), codec)

    def _recover_spool(self) -> None:
        number = self.state.open_round
        if self._config.is_asynchronous and number > 0:
            self.shard.spool.keep(self._is_wanted)
        else:
            self.shard.spool.open_round(number)
        for peer, index in dict(self.state.uploaded).items():
            made_for = self.state.made_for(peer)
            missing = self.shard.missing(self.shard.contribution(peer, made_for), index, made_for)
            if missing is not None:
                self.shard.spool.discard(peer)
                self.record({"event": "forgotten", "round": made_for, "peer": peer, "reason": missing})

    def _is_wanted(self, peer: str, number: int) -> bool:
        """Return whether what a killed server has of a contribution may still be used, or is nothing of the run's."""
        if peer not in self.history.indices:
            return True
        if peer in self.state.uploaded:
            return number == self.state.made_for(peer)
        return peer in self.state.members and 0 < number <= self.state.open_round and self.state.accepts(peer, number)


def _kept_states(config: RunConfig) -> dict[str, str | int]:
    """Return what the states of the outer optimizer depend on."""
    found: dict[str, str | int] = {"outer_optimizer": config.outer_optimizer}
    if config.is_asynchronous:
        found["contributions_per_step"] = config.contributions_per_step or config.peers
    return found
