# SPDX-License-Identifier: Apache-2.0
"""What `megatron-ext simulate` says against what happens: `python -m benchmarks.simulated`."""
