# SPDX-License-Identifier: Apache-2.0
"""What local SGD writes into checkpoints, and how it reads it back."""
