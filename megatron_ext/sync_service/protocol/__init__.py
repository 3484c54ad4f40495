# SPDX-License-Identifier: Apache-2.0
"""What travels: messages, frames, the catalog of tensors, and how a request is refused. Imports no other room."""
