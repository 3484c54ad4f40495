# SPDX-License-Identifier: Apache-2.0
"""How hot switching trains beside Megatron's packed and padded rows: `python -m benchmarks.hot_switch_convergence`."""
