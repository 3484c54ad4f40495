# SPDX-License-Identifier: Apache-2.0
"""What a switch moves: from two strategies to what each rank sends and receives, and what that costs."""
