# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings: `pip install -e '.[docs]'`, then `sphinx-build -W docs docs/_build`.

The reference pages are made from the code while the site is built (`reference_generator`), so that no copy of them can
become stale.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from megatron_ext.version import __version__  # noqa: E402  # the path is set above

project = "megatron_ext"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference_generator.directives"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
# Two hyphens are the beginning of a flag, not a dash.
smartquotes = False
# Pages link to READMEs outside of docs, which are words without a link in the built pages; tests look at where
# links lead.
suppress_warnings = ["myst.xref_missing"]

html_theme = "furo"
html_title = f"megatron_ext {release}"
html_copy_source = False

# The engines' modules import Megatron late or not at all; what does is not shown here.
autodoc_mock_imports = ["megatron"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}
# Docstrings are Google's, with code in single backticks.
default_role = "code"
