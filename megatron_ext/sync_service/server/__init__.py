# SPDX-License-Identifier: Apache-2.0
"""The server process: its runs, its port, and who may ask it for what."""
