# SPDX-License-Identifier: Apache-2.0
"""Evidence that local SGD converges as synchronous training does: `python -m benchmarks.convergence`."""
