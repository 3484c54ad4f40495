# SPDX-License-Identifier: Apache-2.0
"""A peer's side of the service. Imports no Megatron."""
