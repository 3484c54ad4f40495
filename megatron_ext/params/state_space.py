# SPDX-License-Identifier: Apache-2.0
"""State-space (Mamba-2) layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.params.tensors import ParamsError, require_sizes


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Sizes of state-space layers (Dao and Gu, 2024: Mamba-2)."""

    heads: int
    """Heads (``--mamba-num-heads``)."""

    head_dim: int
    """Channels of a head (``--mamba-head-dim``)."""

    groups: int
    """Groups of heads that have the input and output projections of the state, B and C, in common
    (``--mamba-num-groups``)."""

    state_dim: int
    """Size of a channel's state (``--mamba-state-dim``)."""

    conv_width: int = 4
    """Positions that the causal convolution sees."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        require_sizes("state-space layers", self, ("heads", "head_dim", "groups", "state_dim", "conv_width"))
        if self.heads % self.groups:
            raise ParamsError(f"state-space layers: {self.heads} heads cannot be divided over {self.groups} groups")

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> dict[str, int]:
        """Rows of the input projection by name: gate (z), input (x), B, C and the time step of each head (dt)."""
        states = self.groups * self.state_dim
        return {"z": self.inner_size, "x": self.inner_size, "B": states, "C": states, "dt": self.heads}

    @property
    def convolved(self) -> dict[str, int]:
        """Channels of the convolution by name: those of the input projection that it sees."""
        return {name: size for name, size in self.projected.items() if name in ("x", "B", "C")}
