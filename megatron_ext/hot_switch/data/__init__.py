# SPDX-License-Identifier: Apache-2.0
"""From documents to the packed rows that each strategy and each replica trains."""
