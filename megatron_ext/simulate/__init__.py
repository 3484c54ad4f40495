# SPDX-License-Identifier: Apache-2.0
"""What a run would do, by the clock: intervals of training, messages on links, failures; no Megatron, no processes.

Time passes here in events: an interval is trained, a round is launched, turned, applied. What happens at an event is
decided by the functions that decide it in a run: the schedule of rounds, fragments, codecs' bytes, windows of A-EDiT.
"""
