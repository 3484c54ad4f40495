# SPDX-License-Identifier: Apache-2.0
"""What the synthetic peers learn: a linear map, from noisy samples, by plain gradient descent.

With experts every sample has one of them besides, whose map of some of the inputs is added. A peer trains those that it
owns, and uses the others as they are.

An interval depends on nothing but the values that it begins with and the samples that it takes, so that the values of
every round follow from the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from tests.chaos.settings import BATCH, STEPS

__all__ = ["Task", "Values"]

Values = dict[str, torch.Tensor]

_INPUTS, _OUTPUTS, _SAMPLES = 128, 256, 4096
_EXPERT_INPUTS = {"linear_fc1.weight": slice(0, 32), "linear_fc2.weight": slice(32, 40)}
"""Which inputs a tensor of an expert maps."""
_LAYER = "decoder.layers.1.mlp"
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

    def __init__(self, seed: int, owners: Sequence[tuple[int, ...]] = ()) -> None:
        """Draw them.

        Args:
            seed: decides all.
            owners: of every expert, the indices of the peers that train it.
        """
        self._owners = tuple(owners)
        draw = torch.Generator().manual_seed(seed)
        self._truth = torch.randn(_INPUTS, _OUTPUTS, generator=draw) / _INPUTS**0.5
        self._inputs = torch.randn(_SAMPLES, _INPUTS, generator=draw)
        noise = torch.randn(_SAMPLES, _OUTPUTS, generator=draw) * _NOISE
        self._outputs = self._inputs @ self._truth + noise
        # Spread over the samples so that every part has some of each.
        self._experts = (torch.arange(_SAMPLES) * 2654435761 >> 7) % max(len(self._owners), 1)
        for expert in range(len(self._owners)):
            rows, columns = self._experts == expert, _EXPERT_INPUTS["linear_fc1.weight"]
            truth = torch.randn(columns.stop, _OUTPUTS, generator=draw) / columns.stop**0.5
            self._outputs[rows] += self._inputs[rows, columns] @ truth

    @cached_property
    def start(self) -> Values:
        """The values that everybody begins with."""
        found = {"layer.0.weight": torch.zeros(_INPUTS, _OUTPUTS), "layer.0.bias": torch.zeros(_OUTPUTS)}
        draw = torch.Generator().manual_seed(0)
        for expert in range(len(self._owners)):
            for leaf, columns in _EXPERT_INPUTS.items():
                values = torch.randn(_OUTPUTS, columns.stop - columns.start, generator=draw)
                found[_expert_name(expert, leaf)] = values / 10  # alike experts could not be told apart in a merge
        return found

    @cached_property
    def catalog(self) -> Catalog:
        """What the tensors are to a server: each a unit, and all experts one."""
        owners = {
            _expert_name(expert, leaf): found for expert, found in enumerate(self._owners) for leaf in _EXPERT_INPUTS
        }
        return Catalog(
            TensorSpec(
                name=name,
                shape=tuple(value.shape),
                unit=_LAYER if name in owners else name,
                owners=owners.get(name, ()),
            )
            for name, value in self.start.items()
        )

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
        values = {name: value.clone() for name, value in values.items()}
        weight, bias = values["layer.0.weight"], values["layer.0.bias"]
        total = 0.0
        for step in range(STEPS):
            first = begin + step * BATCH
            rows = [(k * peers + index) % _SAMPLES for k in range(first, first + BATCH)]
            inputs, experts = self._inputs[rows], self._experts[rows]
            error = self._predicted(values, inputs, experts) - self._outputs[rows]
            total += error.square().mean().item()
            weight -= _RATE * (inputs.t() @ error) / BATCH
            bias -= _RATE * error.mean(0)
            for expert, owners in enumerate(self._owners):
                if index in owners:
                    own = experts == expert
                    for leaf, columns in _EXPERT_INPUTS.items():
                        values[_expert_name(expert, leaf)] -= _RATE * (error[own].t() @ inputs[own, columns]) / BATCH
        return values, total / STEPS

    def loss(self, values: Values) -> float:
        """Return the loss over all samples."""
        predicted = self._predicted(values, self._inputs, self._experts)
        return (predicted - self._outputs).square().mean().item()

    def _predicted(self, values: Values, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        found = inputs @ values["layer.0.weight"] + values["layer.0.bias"]
        for expert in range(len(self._owners)):
            own = experts == expert
            for leaf, columns in _EXPERT_INPUTS.items():
                found[own] += inputs[own, columns] @ values[_expert_name(expert, leaf)].t()
        return found


def _expert_name(expert: int, leaf: str) -> str:
    return f"{_LAYER}.experts.{expert}.{leaf}"
