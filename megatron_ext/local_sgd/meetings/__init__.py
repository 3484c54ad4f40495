# SPDX-License-Identifier: Apache-2.0
"""Workers of Megatron's loop that meet by time (A-EDiT): an iteration of the loop is a meeting."""
