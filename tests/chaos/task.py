# SPDX-License-Identifier: Apache-2.0
"""What the synthetic peers learn: a linear map, from noisy samples, by plain gradient descent.

An interval depends on nothing but the values that it begins with and the samples that it takes, so that the values of
every round follow from the history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from tests.chaos.settings import BATCH, STEPS

__all__ = ["Task", "Values"]

Values = dict[str, torch.Tensor]

_INPUTS, _OUTPUTS, _SAMPLES = 128, 256, 4096
_NOISE = 0.7
_RATE = 0.015


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with the threads of a peer: the same sums, and on a busy machine no waiting for the other thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Task:
    """The samples of a seed."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._truth = torch.randn(_INPUTS, _OUTPUTS, generator=draw) / _INPUTS**0.5
        self._inputs = torch.randn(_SAMPLES, _INPUTS, generator=draw)
        noise = torch.randn(_SAMPLES, _OUTPUTS, generator=draw) * _NOISE
        self._outputs = self._inputs @ self._truth + noise

    @cached_property
    def start(self) -> Values:
        """The values that everybody begins with."""
        return {"layer.0.weight": torch.zeros(_INPUTS, _OUTPUTS), "layer.0.bias": torch.zeros(_OUTPUTS)}

    def interval(self, values: Values, index: int, peers: int, begin: int) -> tuple[Values, float]:
        """Return the values after an interval, and its mean loss.

        Args:
            values: before it; not changed.
            index: whose part of the samples: sample k of it is sample k * peers + index.
            peers: how many parts there are.
            begin: samples of the part that were taken before.
        """
        with _one_thread():
            return self._interval(values, index, peers, begin)

    def _interval(self, values: Values, index: int, peers: int, begin: int) -> tuple[Values, float]:
        weight, bias = values["layer.0.weight"].clone(), values["layer.0.bias"].clone()
        total = 0.0
        for step in range(STEPS):
            first = begin + step * BATCH
            rows = [(k * peers + index) % _SAMPLES for k in range(first, first + BATCH)]
            inputs, outputs = self._inputs[rows], self._outputs[rows]
            error = inputs @ weight + bias - outputs
            total += error.square().mean().item()
            weight -= _RATE * (inputs.t() @ error) / BATCH
            bias -= _RATE * error.mean(0)
        return {"layer.0.weight": weight, "layer.0.bias": bias}, total / STEPS

    def loss(self, values: Values) -> float:
        """Return the loss over all samples."""
        predicted = self._inputs @ values["layer.0.weight"] + values["layer.0.bias"]
        return (predicted - self._outputs).square().mean().item()
