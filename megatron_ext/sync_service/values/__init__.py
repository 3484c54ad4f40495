# SPDX-License-Identifier: Apache-2.0
"""The values of a run on the disk: contributions, snapshots, and what a round makes of them, block by block."""
