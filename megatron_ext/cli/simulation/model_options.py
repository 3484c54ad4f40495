# SPDX-License-Identifier: Apache-2.0
"""The model of a simulation: its shape, or only how large it is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megatron_ext.cli.shape_options import MOST_EXPERTS, read_shape, shape_flags
from megatron_ext.errors import UserError
from megatron_ext.phrases import short_number

__all__ = ["MODEL", "STEP", "add_parameters_option", "units_from"]

MODEL = ("--model", "--num-layers", "--parameters")
"""Flags with one of which the model's description begins."""

STEP = ("--step-seconds", "--tflops")
"""Flags that say how long its step takes."""


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
    from megatron_ext.simulate.number_rules import NumberRule
    from megatron_ext.simulate.training_work import MOST_PARAMETERS

    if options.parameters is None:
        return units_of(read_shape(options))
    allowed = NumberRule(least=1, most=MOST_PARAMETERS)
    if not allowed.allows(options.parameters):
        raise UserError(f"simulate: --parameters is {short_number(options.parameters)}; give a number {allowed}")
    beside = [flag for flag in shape_flags(options) if flag != "--num-layers"]
    if beside:
        raise UserError(f"simulate: --parameters is given beside the model's shape; drop it, or {', '.join(beside)}")
    flag, layers = "--num-layers", options.num_layers
    if layers is None:
        flag, layers = "--local-sgd-fragments", max(fragments, 1)
    allowed = NumberRule(least=1, most=min(MOST_EXPERTS, int(options.parameters)))
    if not allowed.allows(layers):
        raise UserError(f"simulate: {flag} is {short_number(layers)}; give a number {allowed}")
    return equal_layers(int(options.parameters), layers)
