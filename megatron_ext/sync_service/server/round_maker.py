# SPDX-License-Identifier: Apache-2.0
"""The thread of a run that closes its rounds, makes their values, and commits them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from megatron_ext.sync_service.disk.durable import described
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.protocol.round_digest import RoundDigest
from megatron_ext.sync_service.rounds.config import RunConfig
from megatron_ext.sync_service.rounds.journal import Event
from megatron_ext.sync_service.rounds.presence import Presence
from megatron_ext.sync_service.server.store import RunStore
from megatron_ext.sync_service.shards.remote_shard import ShardProblem
from megatron_ext.sync_service.shards.shard import RoundJob, Uploader
from megatron_ext.sync_service.shards.shards import Shards
from megatron_ext.sync_service.values.decision import Decision, decide, untouched
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.reduction import DamagedContribution, Made

__all__ = ["RoundMaker"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
"""After a round could not be written."""

_LOOK_SECONDS = 1.0
"""Between two looks for peers whose heartbeats have failed to come."""

_STANDSTILL_SECONDS = 3.0
"""A look that comes so much later finds that the server's process, or its machine, has stood still."""


class RoundMaker:
    """Makes rounds until it is stopped. Holds the run's lock but while it works on values."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        store: RunStore,
        shards: Shards,
        presence: Presence,
        changed: threading.Condition,
        failpoints: Failpoints,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Start the thread.

        Args:
            run: its id.
            config: of the run.
            store: its state.
            shards: where its values are.
            presence: which processes are alive.
            changed: the run's lock, notified of every change.
            failpoints: where to die in tests.
            on_fatal: called with what ended the thread.
        """
        self.problem = ""
        self._run = run
        self._config = config
        self._store = store
        self._shards = shards
        self._presence = presence
        self._changed = changed
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._stopping = False
        self._look_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="rounds", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the round that it is making."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._make_round()
                except OSError as error:
                    self._say_problem(error)
        except BaseException as error:  # whatever ends this thread has to end the run, and not in silence
            self._on_fatal(error)

    def _wait_for_work(self) -> bool:
        """Return when a round is to be closed or made; False at the end."""
        with self._changed:
            self._look_at = max(self._look_at, time.monotonic())  # the time of the last round does not count
            while not self._stopping:
                if time.monotonic() >= self._look_at:
                    self._look_who_is_silent()
                seconds = self._seconds_until_close()
                if seconds == 0.0:
                    self._tell_who_is_silent()  # before the round that closes without them
                    return True
                until_look = max(self._look_at - time.monotonic(), 0.0)
                self._changed.wait(until_look if seconds is None else min(seconds, until_look))
        return False

    def _seconds_until_close(self) -> float | None:
        return self._store.state.seconds_until_close(time.monotonic(), self._presence.gone_from)

    def _look_who_is_silent(self) -> None:
        now = time.monotonic()
        if now > self._look_at + _STANDSTILL_SECONDS:
            self._presence.was_deaf()
        self._look_at = now + _LOOK_SECONDS
        self._tell_who_is_silent()

    def _tell_who_is_silent(self) -> None:
        for peer in self._presence.newly_silent(self._store.state.members):
            seconds = self._presence.silent_seconds(peer)
            log.warning("run %s: no heartbeat from peer %s for %.0f s", self._run, peer, seconds)

    def _say_problem(self, error: OSError) -> None:
        with self._changed:
            what = "made" if isinstance(error, ShardProblem) else "written"
            self.problem = f"round {self._store.state.open_round} cannot be {what}: {described(error)}"
            log.error("%s; trying again", self.problem)
            self._changed.notify_all()
            self._changed.wait(RETRY_SECONDS)

    def _make_round(self) -> None:
        store = self._store
        with self._changed:
            if store.state.closing is None:
                # Once more under the lock: a peer may have been evicted meanwhile.
                if self._seconds_until_close() != 0.0:
                    return
                store.record(store.state.closing_event())
            self._failpoints.hit("round_closed")
            job = self._job()
        began = time.monotonic()
        try:
            decision = self._decide(job)
            if decision is None:
                return
            made = self._shards.write(job, decision)
        except DamagedContribution as damaged:
            with self._changed:
                event = {"round": job.number, "peer": damaged.peer, "reason": damaged.problem}
                store.record({"event": "forgotten", **event})
                self._changed.notify_all()
            return
        event = self._committed(job, decision, made, time.monotonic() - began)
        with self._changed:
            record = store.run_record(event)
        store.shard.publish(record.to_bytes())
        store.copy_snapshot(job.number)
        self._commit(event)

    def _job(self) -> RoundJob:
        """Return what is to be made of the round that has been closed."""
        state = self._store.state
        return RoundJob(
            number=state.open_round,
            uploaders=tuple(
                Uploader(peer=peer, index=state.uploaded[peer], made_for=state.made_for(peer))
                for peer in state.closing or ()
            ),
            outer_scalars=dict(state.outer_scalars),
            record_bytes=self._store.record_bytes,
        )

    def _decide(self, job: RoundJob) -> Decision | None:
        """Return who counts in a round; None when the start is refused."""
        store = self._store
        guards = store.guards()
        decision = decide(
            store.catalog,
            [(uploader.peer, uploader.index) for uploader in job.uploaders],
            self._shards.measure(job),
            guards=guards,
            max_norm=self._config.max_norm,
            is_start=job.number == 0,
            work=self._work_of(job),
            beside=store.state.beside,
        )
        if job.number == 0 and decision.rejected:
            ((peer, problem),) = decision.rejected.items()
            reason = f"the start that it published is refused: {problem}"
            with self._changed:
                store.drop(peer, {"event": "evicted", "peer": peer, "reason": reason, "reopens": True})
                self._changed.notify_all()
            return None
        if guards is not None and guards.clips and job.number > 0:
            squares = self._shards.common_squares(job, decision)
            decision.clip(guards, squares)
        return decision

    def _work_of(self, job: RoundJob) -> dict[int, int]:
        """Return by index by what contributions are weighted, where that was said."""
        state = self._store.state
        with self._changed:
            said = {uploader.index: state.work(uploader.peer) for uploader in job.uploaders}
        return {index: work for index, work in said.items() if work is not None}

    def _committed(self, job: RoundJob, decision: Decision, made: Made, seconds: float) -> Event:
        """Return the event that commits a round."""
        number, merge = job.number, self._store.shard.merge(job.number)
        counted = [(uploader.peer, uploader.index) for uploader in job.uploaders]
        came: Event = {}
        kept: list[int] = []
        if number > 0 and self._config.is_asynchronous:
            # It leaves nearly all owners' tensors, and its peer seldom has the values before it: they are not listed.
            came = {"made_for": job.uploaders[0].made_for, "weight": decision.weight}
        elif number > 0:
            kept = untouched(self._store.catalog, counted, decision, merge)
        return {
            "event": "committed",
            "round": number,
            "digest": RoundDigest([made.sums]).hex(),
            "contributors": [c.peer for c in job.uploaders if c.peer not in decision.rejected],
            "rejected": decision.rejected,
            **({"excluded": decision.excluded} if decision.excluded else {}),
            **({"new_levels": decision.new_levels} if decision.new_levels else {}),
            **({"lasting": decision.lasting} if decision.lasting else {}),
            **({"merged": merge.alpha} if merge is not None else {}),
            **({"kept": kept} if kept else {}),
            **came,
            "norms": {peer: norm for peer, norm in decision.norms.items() if math.isfinite(norm)},
            "bytes": decision.nbytes,
            "outer_scalars": made.outer_scalars,
            "seconds": round(seconds, 3),
        }

    def _commit(self, event: Event) -> None:
        snapshot = Snapshot(self._store.shard.snapshot_path(event["round"]))
        for peer, what in event.get("lasting", {}).items():
            log.warning("round %d: peer %s: %s", event["round"], peer, what)
        with self._changed:
            self._store.commit(event, snapshot)
            self._failpoints.hit("round_committed")
            self.problem = ""
            self._changed.notify_all()
        self._failpoints.hit("round_told")
