# SPDX-License-Identifier: Apache-2.0
"""How workers exchange tensors."""
