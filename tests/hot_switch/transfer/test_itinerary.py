# SPDX-License-Identifier: Apache-2.0
"""What a rank does in a switch copies nothing that need not be copied."""

import pytest

from megatron_ext.hot_switch import plan_switch
from megatron_ext.hot_switch.transfer.itinerary import make_itinerary
from megatron_ext.hot_switch.transfer.messages import MessageSizes
from megatron_ext.params import Layout
from tests.hot_switch.executions import DENSE

TO_EVERYBODY = plan_switch(DENSE, Layout(tp=4), Layout(dp=4))
"""Every rank sends its quarter of each matrix to the three others."""


@pytest.mark.parametrize("rank", range(4))
def test_what_several_peers_get_is_packed_once(rank):
    sizes = MessageSizes(direct_bytes=1 << 40, chunk_bytes=1 << 20)
    itinerary = make_itinerary(TO_EVERYBODY, rank, sizes)
    (only,) = itinerary.rounds
    assert [parcel.peer for parcel in only.sends] == [(rank + distance) % 4 for distance in (1, 2, 3)]
    (place,) = {parcel.staged_at for parcel in only.sends}
    assert place is not None
    arriving = [parcel.message.nbytes for parcel in only.receives]
    assert itinerary.staging_bytes < sum(arriving) + 2 * only.sends[0].message.nbytes


@pytest.mark.parametrize("rank", range(4))
def test_runs_of_memory_leave_and_land_where_they_are(rank):
    itinerary = make_itinerary(TO_EVERYBODY, rank, MessageSizes(direct_bytes=1, chunk_bytes=1 << 20))
    (only,) = itinerary.rounds
    seen = set()
    for parcel in (*only.sends, *only.receives):
        (part,) = parcel.message.parts
        window = part.source if parcel in only.sends else part.target
        assert (parcel.staged_at is None) == window.is_run
        seen.add(window.is_run)
    assert seen == {True, False}
