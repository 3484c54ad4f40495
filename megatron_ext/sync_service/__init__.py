# SPDX-License-Identifier: Apache-2.0
"""The sync service: separate jobs (peers) meet in rounds at a server. Needs the extra `spes`; imports no Megatron."""
