# SPDX-License-Identifier: Apache-2.0
"""Who calls the server, and how much of it one caller may hold: calls, bytes, threads and connections."""
