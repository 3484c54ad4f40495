# SPDX-License-Identifier: Apache-2.0
"""What Megatron needs of the einops package, which tests do without: one rearrangement of ranks."""

from types import SimpleNamespace
from typing import Any

__all__ = ["stand_in_for_einops"]


def stand_in_for_einops() -> None:
    """Before: let Megatron make the groups of optimizer instances."""
    from megatron.core import parallel_state

    def rearrange(ranks: Any, pattern: str, *, u: int, s: int, l: int) -> Any:  # noqa: E741  Megatron's name
        assert pattern == "(l s u) -> (l u) s"
        return ranks.reshape(l, s, u).transpose(0, 2, 1).reshape(l * u, s)

    parallel_state.einops, parallel_state.HAVE_EINOPS = SimpleNamespace(rearrange=rearrange), True
