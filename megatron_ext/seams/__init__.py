# SPDX-License-Identifier: Apache-2.0
"""The seams: small wrappers around named functions of Megatron that raise events, one file per area.

Nothing outside this folder knows Megatron's internals, except the CPU backend and the adapter of `params`.
"""
