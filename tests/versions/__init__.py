# SPDX-License-Identifier: Apache-2.0
"""What runs on which release of Megatron: `python -m tests.versions` tries one, and writes docs/versions.md."""
