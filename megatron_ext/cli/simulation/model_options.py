# SPDX-License-Identifier: Apache-2.0
"""The model of a simulation: its shape, or only how large it is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from megatron_ext.cli.shape_options import read_shape
from megatron_ext.errors import UserError

__all__ = ["add_parameters_option", "units_from"]


def add_parameters_option(parser: argparse.ArgumentParser) -> None:
    """Add the size that can be given in place of a shape."""
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="in place of the model's shape: its parameters, such as 7e9, which --num-layers share equally",
    )


def units_from(options: argparse.Namespace, fragments: int) -> Mapping[str, int]:
    """Return the number of values of every unit of the model.

    Args:
        options: that were parsed.
        fragments: as many layers as are needed where their number is not given.

    Raises:
        UserError: there is no such model.
    """
    from megatron_ext.simulate.model_units import equal_layers, units_of

    if options.parameters is None:
        return units_of(read_shape(options))
    if not 1 <= options.parameters < math.inf:
        raise UserError(f"simulate: --parameters is {options.parameters:g}; give a number of at least 1")
    if options.model is not None or options.hidden_size is not None:
        raise UserError("simulate: --parameters is given beside the model's shape; drop one of them")
    layers = options.num_layers if options.num_layers is not None else max(fragments, 1)
    if not 1 <= layers <= options.parameters:
        raise UserError(f"simulate: --num-layers is {layers}; give a number from 1 to --parameters")
    return equal_layers(int(options.parameters), layers)
