# SPDX-License-Identifier: Apache-2.0
"""Several servers that share the values of a run, and copies of what they keep at a URL."""
