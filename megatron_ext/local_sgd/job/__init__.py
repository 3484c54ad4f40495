# SPDX-License-Identifier: Apache-2.0
"""A worker inside a Megatron job: its values and groups, its rounds around steps, what evaluations and saves see."""
