# SPDX-License-Identifier: Apache-2.0
"""Directives of the reference pages: `config-fields CLASS`, `commands`, `registry NAME`."""

from __future__ import annotations

from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from megatron_ext.cli.main import make_parser
from reference_generator import commands, config_fields, registries

__all__ = ["setup"]


class _ConfigFields(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"flags": directives.flag}

    def run(self) -> list[nodes.Node]:
        cls = config_fields.of_name(self.arguments[0])
        return self.parse_text_to_nodes(config_fields.markdown(cls, as_flags="flags" in self.options))


class _Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(commands.markdown(make_parser()), allow_section_headings=True)


class _Registry(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(registries.markdown(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    app.add_directive("config-fields", _ConfigFields)
    app.add_directive("commands", _Commands)
    app.add_directive("registry", _Registry)
    return {"parallel_read_safe": True}
