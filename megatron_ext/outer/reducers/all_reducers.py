# SPDX-License-Identifier: Apache-2.0
"""The reducers by name: how pseudo-gradients of workers in a job, in plain PyTorch and at a server become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.plugins import Registry

if TYPE_CHECKING:
    from megatron_ext.outer.reducers.reducer import Reducer

__all__ = ["DEFAULT_REDUCER", "REDUCERS"]

DEFAULT_REDUCER = "linear"
"""Unless another one is asked for."""

# By name, so that a list of them imports nothing.
_OWN = {
    DEFAULT_REDUCER: "megatron_ext.outer.reducers.linear:Linear",
    "gta": "megatron_ext.outer.reducers.gta:Gta",
    "pairwise": "megatron_ext.outer.reducers.pair_mean:Pairwise",
}


def _problems(name: str, kind: Any) -> list[str]:
    from megatron_ext.outer.reducers.reducer_checks import reducer_problems

    return reducer_problems(name, kind)


REDUCERS: Registry[type[Reducer]] = Registry("reducer", "megatron_ext.reducers", _OWN, _problems)
"""Other packages add theirs under the entry-point group `megatron_ext.reducers`."""
