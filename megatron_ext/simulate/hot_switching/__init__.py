# SPDX-License-Identifier: Apache-2.0
"""Training with hot switching, step by step, beside single strategies under the same limit of memory."""
