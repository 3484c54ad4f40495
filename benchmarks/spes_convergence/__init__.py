# SPDX-License-Identifier: Apache-2.0
"""Evidence that SPES converges as centralized training does: `python -m benchmarks.spes_convergence`."""
