# SPDX-License-Identifier: Apache-2.0
"""Carrying out the plan of a switch over torch.distributed."""
