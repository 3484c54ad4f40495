# SPDX-License-Identifier: Apache-2.0
"""The weights of the last round in the model for a while: for an evaluation, or for a checkpoint of weights alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_ext.seams import forward

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from megatron_ext.local_sgd.job.worker import Worker

__all__ = ["SyncedWeights"]


class SyncedWeights:
    """Puts what all workers have had last in place of a worker's own weights, and these back."""

    def __init__(self, worker: Worker, model: Sequence[Any]) -> None:
        """Prepare.

        Args:
            worker: of this rank.
            model: the model chunks.
        """
        self._worker, self._model = worker, model
        self._own: list[torch.Tensor] | None = None
        self._own_biases: list[torch.Tensor] | None = None

    @property
    def is_put(self) -> bool:
        """Whether the model has the synced weights now."""
        return self._own is not None

    def put(self, *, biases: bool = False) -> None:
        """Put the synced weights into the model.

        Args:
            biases: whether routers get the mean of all workers' biases besides, which are not trained by gradients.
        """
        synced = self._worker.engine.gather_anchor()
        self._own = [value.clone() for value in self._worker.engine.values]
        self._worker.put(synced)
        if biases:
            self._own_biases = self._worker.put_mean_biases()

    def take_back(self) -> None:
        """Put the worker's own weights back, if others are there."""
        if self._own is not None:
            self._worker.put(self._own)
            self._own = None
        if self._own_biases is not None:
            self._worker.put_biases(self._own_biases)
            self._own_biases = None
        forward.gather_afresh(self._model)
