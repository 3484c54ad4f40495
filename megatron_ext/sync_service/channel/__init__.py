# SPDX-License-Identifier: Apache-2.0
"""Connections to servers: addresses, TLS, tokens, retries, and parallel streams."""
