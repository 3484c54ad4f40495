# SPDX-License-Identifier: Apache-2.0
"""What this package adds to megatron_ext: one file for each thing."""
