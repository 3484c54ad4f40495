# SPDX-License-Identifier: Apache-2.0
"""Whether a corpus' tokens, its record and the vocabulary that a user gives fit each other."""
