# SPDX-License-Identifier: Apache-2.0
"""The outer round as pure functions of tensors: who counts, what the pseudo-gradients become, and the outer step."""
