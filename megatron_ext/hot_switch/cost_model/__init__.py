# SPDX-License-Identifier: Apache-2.0
"""How long strategies take and whether they fit, for choosing them before a run."""
