# SPDX-License-Identifier: Apache-2.0
"""Who is a member of a run: peers are let in and out, and a process speaks for each of them."""

from __future__ import annotations

import logging
import time

from megatron_ext.sync_service.protocol.catalog import Catalog
from megatron_ext.sync_service.protocol.refusal import NameInUse, Refusal
from megatron_ext.sync_service.protocol.report import INTERVAL, LONGEST_DATA
from megatron_ext.sync_service.rounds.changes import Changes
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.draining import Draining
from megatron_ext.sync_service.rounds.handshake import check_against, check_alone
from megatron_ext.sync_service.rounds.members import Admission, Member
from megatron_ext.sync_service.rounds.place_data import the_differing
from megatron_ext.sync_service.rounds.presence import Presence
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.shards import Shards

__all__ = ["Admissions"]

log = logging.getLogger(__name__)

_LONGEST_REASON = 300
"""Letters of why a peer was evicted."""


class Admissions:
    """The members of a run. Its methods may be called from several threads, unless they say otherwise."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        addresses: tuple[str, ...],
        *,
        store: RunStore,
        shards: Shards,
        draining: Draining,
        presence: Presence,
        changes: Changes,
    ) -> None:
        """Take what the run is made of.

        Args:
            name: the run id.
            config: of the run.
            addresses: of the servers that have its values when there are several, this one first.
            store: its durable state.
            shards: the parts of its values.
            draining: whether it is being brought to a rest.
            presence: which processes are alive.
            changes: the lock of all of that.
        """
        self._name = name
        self._config = config
        self._addresses = addresses
        self._store = store
        self._state = store.state
        self._shards = shards
        self._draining = draining
        self._presence = presence
        self._changes = changes
        self._differing = ""
        """What was last said of a place that has other data than all others."""
        for member in self._state.members.values():
            # Of those who were alive when a former server ended, the next heartbeat tells.
            presence.begins(member.name, member.alive_seconds)

    def register(
        self,
        peer: str,
        instance: str,
        *,
        config: dict[str, str],
        catalog: Catalog,
        index: int | None,
        peers: int | None,
        asynchronous: bool,
        sharded: bool,
        certificate: str | None = None,
        take_over: bool = False,
        alive_seconds: float = 0.0,
        data: str = "",
        continue_run: bool = False,
    ) -> Admission:
        """Make a peer a member.

        Args:
            peer: its name.
            instance: which process speaks for it.
            config: what must be the same for all peers, `codec` among it.
            catalog: the tensors.
            index: the place that it wants.
            peers: how many peers it believes there are.
            asynchronous: whether it can take part in asynchronous rounds.
            sharded: whether it can talk to several servers.
            certificate: whose certificate it has shown, if any.
            take_over: whether it takes the place of a process that is alive.
            alive_seconds: for how long it counts as alive after every word; 0 if it sends no heartbeats.
            data: which data it trains on; empty where it does not say.
            continue_run: whether its place may have trained on others before.

        Raises:
            NameInUse: another process speaks for the peer, and is alive.
            Refusal: it does not fit the run.
            OSError: the disk refuses.
        """
        if len(data) > LONGEST_DATA or not data.isprintable():
            raise Refusal("invalid", f"data has {len(data)} characters; {LONGEST_DATA} printable ones are enough")
        check_alone(self._config, config, catalog)  # may take long, for which nobody else waits
        with self._changes:
            self._draining.check(self._state.open_round)
            if peers not in (None, self._config.peers):
                raise Refusal("state", f"peers is {peers} at peer {peer!r} and {self._config.peers} in the run")
            if self._config.is_asynchronous and not asynchronous:
                raise Refusal(
                    "state", f"the run has asynchronous rounds, which peer {peer!r} does not know; update it"
                )
            if self._shards.others and not sharded:
                raise Refusal("state", f"the run has several servers, which peer {peer!r} does not know; update it")
            if self._shards.problem:
                raise Refusal("state" if self._shards.is_refused else "later", self._shards.problem)
            if lacking := self._shards.lacking(config["codec"]):
                raise Refusal("state", lacking)
            begins = self._begins_with(config, catalog)
            if not begins:
                own = {INTERVAL} if self._config.is_asynchronous else set()
                check_against(self._store.agreed, self._store.catalog, peer, config, catalog, own)
            self._check_certificate(peer, certificate)
            event = self._state.check_joining(peer, instance, index)
            if event is not None and not continue_run:
                self._check_data(peer, event["index"], data)
            until = self._presence.alive_until(peer)
            if event is not None and until is not None and not take_over and peer in self._state.members:
                raise NameInUse(self._name, peer, until)
            if event is not None:
                self._store.check_journal()
            if begins:
                self._store.create(config, catalog)
            if event is not None:
                if peer not in self._state.uploaded:
                    # Another process may train from other values: what the former one has sent is not finished by it.
                    self._store.shard.spool.discard(peer)
                said = {"certificate": certificate, "data": data or None, "continue_run": bool(data) and continue_run}
                known = {field: value for field, value in said.items() if value}
                self._store.record({**event, **known, "alive_seconds": alive_seconds})
                self._changes.notify_all()
            self._presence.heard(peer)
            self._presence.begins(peer, alive_seconds)
            index, differing = self._state.members[peer].index, self._differing_place()
            return Admission(
                index=index,
                open_round=self._state.open_round,
                shards=self._addresses,
                shard_of=self._store.shard_of if self._addresses else (),
                warning=self._differing if differing == index else "",
            )

    def heartbeat(self, peer: str, instance: str, alive_seconds: float) -> None:
        """Note that a peer's process counts as alive for some seconds; for 0 that it does not any more.

        Raises:
            Refusal: it does not speak for the peer.
        """
        with self._changes:
            self.caller(peer, instance)
            self._presence.says(peer, alive_seconds)

    def leave(self, peer: str, instance: str) -> None:
        """End a membership.

        Raises:
            Refusal: another process speaks for the peer by now.
        """
        with self._changes:
            if peer in self._state.members:
                self.caller(peer, instance)
                self._store.drop(peer, {"event": "left", "peer": peer})
                self._changes.notify_all()

    def evict(self, peer: str, reason: str) -> None:
        """End a membership against the peer's will; its process is refused from then on.

        Raises:
            Refusal: there is no such peer.
        """
        with self._changes:
            if peer not in self._state.members:
                names = ", ".join(self._state.members) or "none"
                raise Refusal("not_found", f"run {self._name!r} has no peer {peer!r}; its peers are: {names}")
            self._store.drop(peer, {"event": "evicted", "peer": peer, "reason": _printable(reason)})
            self._changes.notify_all()

    def caller(self, peer: str, instance: str) -> Member:
        """Return the member that calls, and note that it did; to be called with the lock held.

        Raises:
            Refusal: the caller is refused.
        """
        member = self._state.check_caller(peer, instance)
        self._store.history.seen(peer, time.time())
        self._presence.heard(peer)
        return member

    def _begins_with(self, config: dict[str, str], catalog: Catalog) -> bool:
        """Return whether what a peer brings is what the run becomes from now on.

        A peer with a wrong setting that left before there was a round must not stand in the way of the right ones.
        Other shards know the former tensors, so there it does.
        """
        if self._state.config is None:
            return True
        if not self._state.is_deserted or self._shards.others:
            return False
        return config != self._store.agreed or self._store.catalog.difference(catalog) is not None

    def _check_data(self, peer: str, index: int, data: str) -> None:
        """Check that a peer trains on what its place has contributed from: it may be a new experiment's.

        A place that has contributed nothing, or whose peers have not said from what, takes any data.

        Raises:
            Refusal: it trains on other data.
        """
        known = self._state.data.get(index, data)
        if data and data != known:
            places = [str(place) for place, others in self._state.data.items() if others == data]
            elsewhere = f", which place {' and '.join(places)} has (--sync-service-index)," if places else ","
            raise Refusal(
                "state",
                f"the training data of peer {peer!r} are {data!r}{elsewhere} and its place {index} in run "
                f"{self._name!r} has contributed from {known!r}; give the same, or, for a new experiment, a run of "
                "another name or another folder of the server; to continue this run with other data, say continue_run "
                "(--sync-service-continue-run)",
            )

    def _differing_place(self) -> int | None:
        """Return the place that has other data than all others, which agree, and say so once in the log.

        That may be meant, at a site with data of its own; or the peer has begun with the wrong files.
        """
        by_place = {member.index: member.data for member in self._state.members.values() if member.data}
        known = {**self._state.data, **by_place}
        place = the_differing(known)
        if place is None:
            self._differing = ""
            return None
        others = next(data for other, data in known.items() if other != place)
        said = (
            f"run {self._name!r}: the training data of place {place} are {known[place]!r}, and those of all others "
            f"{others!r}; if all are to train on one corpus, start the peer of place {place} with the others' files"
        )
        if said != self._differing:
            log.warning("%s", said)
        self._differing = said
        return place

    def _check_certificate(self, peer: str, certificate: str | None) -> None:
        """Check that a peer's name belongs to whoever calls: to the certificate that was the first to register it.

        Raises:
            Refusal: it belongs to another one.
        """
        owner = self._state.certificates.get(peer)
        if certificate is not None and owner not in (None, certificate):
            raise Refusal(
                "denied",
                f"the name of peer {peer!r} belongs to the certificate of {owner!r}, and this call shows that of "
                f"{certificate!r}; give a peer name of its own, or let an operator evict {peer!r}, which frees it",
            )


def _printable(text: str) -> str:
    """Return what people have written as one line of limited length, without what a terminal would obey."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."
