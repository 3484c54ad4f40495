# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings: `pip install -e '.[docs]'`, then `sphinx-build docs docs/_build`."""

project = "megatron_ext"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
exclude_patterns = ["_build"]
# Pages link to files of the repository, which are not part of the built pages.
suppress_warnings = ["myst.xref_missing"]
