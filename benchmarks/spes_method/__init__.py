# SPDX-License-Identifier: Apache-2.0
"""What SPES costs as a method, told apart from what this implementation does: `python -m benchmarks.spes_method`."""
