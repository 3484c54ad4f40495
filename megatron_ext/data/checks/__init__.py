# SPDX-License-Identifier: Apache-2.0
"""Whether a corpus' tokens, its record and what a user says of its vocabulary fit each other."""
