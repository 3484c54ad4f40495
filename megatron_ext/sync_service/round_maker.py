# SPDX-License-Identifier: Apache-2.0
"""The thread of a run that closes its rounds, makes their values, and commits them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from megatron_ext.sync_service.asynchronous import AsynchronousState
from megatron_ext.sync_service.config import RunConfig
from megatron_ext.sync_service.failpoints import Failpoints
from megatron_ext.sync_service.merge import Merge
from megatron_ext.sync_service.reduction import Alone, Contributor, DamagedContribution, Outcome, Reduction
from megatron_ext.sync_service.snapshot import Snapshot
from megatron_ext.sync_service.store import RunStore

__all__ = ["RoundMaker"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
"""After a round could not be written."""


class RoundMaker:
    """Makes rounds until it is stopped. Holds the run's lock but while it works on values."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        changed: threading.Condition,
        failpoints: Failpoints,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Start the thread.

        Args:
            config: of the run.
            store: its state.
            changed: the run's lock, notified of every change.
            failpoints: where to die in tests.
            on_fatal: called with what ended the thread.
        """
        self.problem = ""
        self._config = config
        self._store = store
        self._changed = changed
        self._failpoints = failpoints
        self._on_fatal = on_fatal
        self._stopping = False
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
        except BaseException as error:
            self._on_fatal(error)

    def _wait_for_work(self) -> bool:
        """Return when a round is to be closed or made; False at the end."""
        with self._changed:
            while not self._stopping:
                seconds = self._store.state.seconds_until_close(time.monotonic())
                if seconds == 0.0:
                    return True
                self._changed.wait(seconds)
        return False

    def _say_problem(self, error: OSError) -> None:
        with self._changed:
            self.problem = f"round {self._store.state.open_round} cannot be written: {error}"
            log.error("%s; trying again", self.problem)
            self._changed.notify_all()
            self._changed.wait(RETRY_SECONDS)

    def _make_round(self) -> None:
        store = self._store
        with self._changed:
            if store.state.closing is None:
                # Once more under the lock: a peer may have been evicted meanwhile.
                if store.state.seconds_until_close(time.monotonic()) != 0.0:
                    return
                store.record(store.state.closing_event())
            self._failpoints.hit("round_closed")
            number, uploaded = store.state.open_round, store.state.uploaded
            contributors = [
                Contributor(
                    peer=peer,
                    index=uploaded[peer],
                    contribution=store.contribution(peer, store.state.made_for(peer)),
                )
                for peer in store.state.closing or ()
            ]
        began = time.monotonic()
        try:
            outcome = self._reduce(number, contributors)
        except DamagedContribution as damaged:
            with self._changed:
                store.spool.discard(damaged.peer)
                store.record({"event": "forgotten", "round": number, "peer": damaged.peer, "reason": damaged.problem})
                self._changed.notify_all()
            return
        if outcome is not None:
            self._commit(number, contributors, outcome, time.monotonic() - began)

    def _reduce(self, number: int, contributors: list[Contributor]) -> Outcome | None:
        """Write a round's snapshot under its name; None when the start is refused."""
        store = self._store
        reduction = Reduction(
            store.catalog,
            self._config.outer,
            codec=store.agreed["codec"],
            max_norm=self._config.max_norm,
            before=store.snapshots[number - 1] if number > 0 else None,
            outer_scalars=store.state.outer_scalars,
            failpoints=self._failpoints,
            guards=store.guards(),
            alone=self._alone(number),
            merge=Merge.of_round(self._config.merging, store.catalog, number * (self._config.sync_steps or 0)),
        )
        outcome = reduction.judge(contributors)
        if number == 0 and outcome.rejected:
            ((peer, problem),) = outcome.rejected.items()
            reason = f"the start that it published is refused: {problem}"
            with self._changed:
                store.drop(peer, {"event": "evicted", "peer": peer, "reason": reason, "reopens": True})
                self._changed.notify_all()
            return None
        writer = reduction.write(store.snapshot_path(number), contributors, outcome)
        self._failpoints.hit("snapshot_written")
        writer.publish()
        self._failpoints.hit("snapshot_renamed")
        store.copy_snapshot(number)
        return outcome

    def _came(self, number: int) -> dict[str, float]:
        """Return what a round of one contribution's alone says of it."""
        state = self._store.state
        if number == 0 or not isinstance(state, AsynchronousState) or not state.closing:
            return {}
        return {"made_for": state.made_for(state.closing[0]), "weight": state.weight}

    def _alone(self, number: int) -> Alone | None:
        state = self._store.state
        if number == 0 or not isinstance(state, AsynchronousState):
            return None
        return Alone(weight=state.weight, per_step=self._config.contributions_per_step or self._config.peers)

    def _commit(self, number: int, contributors: list[Contributor], outcome: Outcome, seconds: float) -> None:
        snapshot = Snapshot(self._store.snapshot_path(number))
        event = {
            "event": "committed",
            "round": number,
            "digest": outcome.digest,
            "contributors": [c.peer for c in contributors if c.peer not in outcome.rejected],
            "rejected": outcome.rejected,
            **({"excluded": outcome.excluded} if outcome.excluded else {}),
            **({"merged": outcome.merged} if outcome.merged else {}),
            **self._came(number),
            "norms": {peer: norm for peer, norm in outcome.norms.items() if math.isfinite(norm)},
            "bytes": sum(contributor.contribution.nbytes for contributor in contributors),
            "outer_scalars": outcome.outer_scalars,
            "seconds": round(seconds, 3),
        }
        with self._changed:
            self._store.commit(event, snapshot)
            self._failpoints.hit("round_committed")
            self.problem = ""
            self._changed.notify_all()
        self._failpoints.hit("round_told")
