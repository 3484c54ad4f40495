# SPDX-License-Identifier: Apache-2.0
"""Other weights for the model, and what is said of them."""

import contextlib
import io

import torch

from tests.local_sgd.plain_runs import model

TIMEOUT = 60.0


def others(seed=5):
    """Return other weights of the model, the same wherever the seed is."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model().state_dict().items()}


def sgd(module, **fields):
    return torch.optim.SGD(module.parameters(), lr=0.02, **fields)


def lines_of(act):
    """Return what the first rank says while `act` runs, a line each."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        act()
    return [line.partition("local SGD: ")[2] for line in said.getvalue().splitlines()]
