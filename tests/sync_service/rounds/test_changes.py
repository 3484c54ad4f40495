# SPDX-License-Identifier: Apache-2.0
"""What concerns no waiting peer wakes none: with a thousand of them each contribution would wake nearly a thousand."""

import asyncio
import threading

from megatron_ext.sync_service.rounds.changes import Changes


def test_coroutines_are_woken_by_what_concerns_them_alone():
    changes, woken = Changes(), []

    async def wait() -> None:
        with changes.watched() as changed:
            with changes:
                changes.notify_threads()
            await asyncio.sleep(0)
            woken.append(changed.is_set())
            with changes:
                changes.notify_all()
            await asyncio.wait_for(changed.wait(), 10)
            woken.append(changed.is_set())

    asyncio.run(wait())
    assert woken == [False, True]


def test_both_wake_a_thread_that_waits():
    changes = Changes()
    for notify in (changes.notify_threads, changes.notify_all):
        ready, woken = threading.Event(), []

        def wait(ready: threading.Event = ready, woken: list[bool] = woken) -> None:
            with changes:
                ready.set()
                woken.append(changes.wait(10))

        thread = threading.Thread(target=wait)
        thread.start()
        ready.wait()
        with changes:  # which the thread has let go of once it waits
            notify()
        thread.join()
        assert woken == [True]
