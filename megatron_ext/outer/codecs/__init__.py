# SPDX-License-Identifier: Apache-2.0
"""Codecs: how values travel in fewer bytes; one file each, by name in `all_codecs`."""
