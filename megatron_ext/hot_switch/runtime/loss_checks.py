# SPDX-License-Identifier: Apache-2.0
"""What a user's loss function has to return, so that the losses of strategies can be added."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_ext.errors import UserError

__all__ = ["LossChecks", "require_names"]


class LossChecks:
    """Looks at what the loss function returns for each micro-batch, on the ranks of last stages."""

    def __init__(self) -> None:
        """Begin with the first step."""
        self._masks: list[torch.Tensor] = []
        self._names: list[str] | None = None
        self._with_padding: list[tuple[torch.Tensor, int]] = []
        self._leaves_padding_out = False

    def begin(self, masks: Sequence[torch.Tensor]) -> None:
        """Say for which micro-batches the loss function is called next, in order.

        Args:
            masks: 1 where a token is predicted and 0 where there is padding, at this rank's positions, on the CPU.
        """
        self._masks = list(masks)

    def applied_to(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step whose loss function is refused where losses cannot be added.

        Megatron takes (mean loss, report), too, and divides it by the number of micro-batches, which strategies share.

        Args:
            forward_step: returns the model's output and the loss function.
        """

        @functools.wraps(forward_step)
        def checked_step(*args: Any, **kwargs: Any) -> Any:
            output, loss_function, *rest = forward_step(*args, **kwargs)
            if loss_function is None:
                return (output, loss_function, *rest)

            def checked(output: Any, *more: Any, **options: Any) -> Any:
                found = loss_function(output, *more, **options)
                if not options:
                    self._check(found)
                return found

            return (output, checked, *rest)

        return checked_step

    def finish(self) -> None:
        """Check the step that was made.

        Raises:
            UserError: wherever there was padding it was counted. (Weights may come to more than the documents' tokens.)
        """
        found, self._with_padding = self._with_padding, []
        if not found:
            return
        # Once seen to be left out it always is, and this waits for the device.
        self._leaves_padding_out = any(float(tokens) != positions for tokens, positions in found)
        if not self._leaves_padding_out:
            raise UserError(
                f"hot switching: the loss function counts all {found[0][1]} positions of a micro-batch, and some of "
                "them are padding; let it take the sum over the loss_mask of the iterator, and count that"
            )

    def _check(self, found: Any) -> None:
        if len(found) != 3:
            raise UserError(
                f"hot switching: the loss function returns {len(found)} values; let it return the sum of the losses, "
                "the number of tokens and the report, as Megatron's pretrain_gpt.py does, so that the losses of "
                "strategies can be added"
            )
        _, tokens, report = found
        for name, value in report.items():
            if value.numel() != 2:
                what = "a single number" if value.numel() == 1 else f"{value.numel()} numbers"
                raise UserError(
                    f"hot switching: the loss function reports {what} as {name!r}; report its sum and the number of "
                    "tokens as Megatron's pretrain_gpt.py does, so that the losses of strategies can be added"
                )
        require_names(report, report if self._names is None else self._names)
        self._names = list(report)
        mask = self._masks.pop(0)
        if not self._leaves_padding_out and not mask.all():
            self._with_padding.append((torch.as_tensor(tokens).detach(), mask.numel()))


def require_names(names: Iterable[str], before: Iterable[str]) -> None:
    """Check the names of what a loss function reports.

    Raises:
        UserError: they are not those of another micro-batch, and could not be added.
    """
    if set(names) != set(before):
        raise UserError(
            f"hot switching: the loss function reports {sorted(names)}; it reported {sorted(before)} before: let it "
            "report the same names in every step, for rows of every length"
        )
