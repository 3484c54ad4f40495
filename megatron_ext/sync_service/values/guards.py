# SPDX-License-Identifier: Apache-2.0
"""EDiT's pseudo-gradient penalty (arXiv 2412.07210) at the server: which peers count in which unit, and how much.

It is that of local SGD, with peers in the place of workers. What all peers train of a unit is judged by itself, and so
is what only its owners train: a peer's experts say nothing about its share of the attention.

A contribution that comes alone is judged as if the other peers had come with it, as they last did.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch

from megatron_ext.config_options import in_field_names
from megatron_ext.errors import UserError
from megatron_ext.outer.lasting import lasting_remarks
from megatron_ext.outer.penalty import Penalty, Verdict, clip_coefficient
from megatron_ext.outer.penalty_config import PenaltyConfig
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec

__all__ = ["Guards", "Judged", "OtherPeer"]

Judged = tuple[str, bool]
"""What is judged as one: a unit, or a tensor without one, and whether only its owners train it."""

OtherPeer = tuple[str, int | None]
"""The name of a member, and its work in its last interval, where it has said that."""

_NORMS, _PEERS = "last_norms", "last_peers"
"""Of the state, where contributions come alone."""

_DTYPES = {"float64": torch.float64, "int64": torch.int64}


class Guards:
    """Decides over the peers of a round."""

    def __init__(self, config: PenaltyConfig, catalog: Catalog, peers: int, state: str | None) -> None:
        """Resume from what was learned.

        Args:
            config: which means of the penalty are used.
            catalog: the tensors.
            peers: number of places for peers.
            state: as the last round's `state` was; None without experience.

        Raises:
            UserError: it was learned with another configuration.
        """
        self.judged: list[Judged] = list(dict.fromkeys(spec.judged_as for spec in catalog))
        self._config = config
        self._peers = peers
        self._penalty = Penalty(config, workers=peers, units=len(self.judged))
        self._verdicts: dict[Judged, Verdict] = {}
        self._titles = {spec.judged_as: spec.judged_title for spec in catalog}
        # By index, whose contribution was the last one that was sound, and its norms; of none where peers meet.
        self._last_peers = [""] * peers
        self._last_norms = torch.zeros(peers, len(self.judged), dtype=torch.float64)
        if state is not None:
            found = json.loads(state)
            self._last_peers = found.pop(_PEERS, self._last_peers)
            learned = _decoded(found)
            self._last_norms = learned.pop(_NORMS, self._last_norms)
            if "window" in learned and config.skip_anomaly and len(learned["window"]) != config.ewma_warmup_steps:
                raise UserError(
                    f"ewma_warmup_steps is {config.ewma_warmup_steps}, but the run's detector has learned with "
                    f"{len(learned['window'])}; give that number, or start a new run under another name"
                )
            self._penalty.load({"detector": learned} if learned else {})

    def decide(
        self,
        squares: Mapping[int, Mapping[Judged, float]],
        work: Mapping[int, int],
        peers: Mapping[int, str],
        beside: Mapping[int, OtherPeer] | None,
    ) -> None:
        """Decide over a round, and learn from it.

        Args:
            squares: by index of the peers whose contributions are sound, the squared norms of their pseudo-gradients.
            work: by index, by what a contribution is weighted where the configuration asks for that; 1 unless given.
            peers: by index the names of whose contributions there are.
            beside: the other members, beside whose last contributions a single one is judged; None where all meet.
        """
        norms = torch.zeros(self._peers, len(self.judged), dtype=torch.float64)
        for index, by_judged in squares.items():
            norms[index] = torch.tensor([by_judged.get(key, 0.0) for key in self.judged], dtype=torch.float64).sqrt()
        done = [work.get(index, 1) if index in squares else 0 for index in range(self._peers)]
        if beside is None:
            decided = self._penalty.decide(norms, done)
        else:
            known = {index: other for index, other in beside.items() if self._is_known(index, other)}
            for index, (_, others_work) in known.items():
                norms[index], done[index] = self._last_norms[index], others_work or 1
            for index in squares:
                self._last_norms[index], self._last_peers[index] = norms[index], peers[index]
            silent = beside.keys() - known.keys()
            decided = [verdict.joined_by(silent) for verdict in self._penalty.decide(norms, done, squares.keys())]
        self._verdicts = dict(zip(self.judged, decided, strict=True))

    def _is_known(self, index: int, other: OtherPeer) -> bool:
        """Return whether there is a contribution of another peer to compare with."""
        peer, work = other
        # By work alone it is compared also after a start with what an earlier release has left, which had no norms.
        by_work_alone = not self._config.has_penalty and work is not None
        return by_work_alone or self._last_peers[index] == peer

    @property
    def verdicts(self) -> dict[Judged, Verdict]:
        """Which indices count in what is judged as one, and with which weights."""
        return self._verdicts

    def excluded(self, spec: TensorSpec, index: int) -> bool:
        """Return whether a peer does not count in a tensor."""
        return index not in self._verdicts[spec.judged_as].accepted

    def reason(self, spec: TensorSpec, index: int) -> str:
        """Return why a peer whose contribution is sound does not count in a tensor."""
        return self._verdicts[spec.judged_as].reasons[index]

    def new_levels(self, index: int) -> dict[str, tuple[float, float]]:
        """Return by unit a peer's new level of norms, by which it is judged from the next round on: before, and now."""
        return {
            self._titles[key]: verdict.new_levels[index]
            for key, verdict in self._verdicts.items()
            if index in verdict.new_levels
        }

    def lasting(self) -> dict[int, str]:
        """Return by index what to do about peers that have been left out in many rounds running."""
        by_unit = {self._titles[key]: verdict.lasting for key, verdict in self._verdicts.items()}
        said = lasting_remarks(by_unit, lambda index: "it")
        return {
            index: in_field_names(text, PenaltyConfig.__dataclass_fields__, off="{}: false")
            for index, text in said.items()
        }

    @property
    def clips(self) -> bool:
        """Whether common pseudo-gradients are clipped."""
        return self._config.clip_pseudo_grad is not None

    def coefficient(self, square: float) -> float:
        """Return by what to multiply a unit's common pseudo-gradient, given its squared norm."""
        return clip_coefficient(square**0.5, self._config.clip_pseudo_grad)

    @property
    def state(self) -> str:
        """What was learned, for the snapshot."""
        learned = self._penalty.state().get("detector", {})
        if not any(self._last_peers):
            return json.dumps(_encoded(learned))
        return json.dumps({**_encoded({**learned, _NORMS: self._last_norms}), _PEERS: self._last_peers})


def _encoded(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": base64.b64encode(value.numpy().tobytes()).decode(),
        }
        for name, value in state.items()
    }


def _decoded(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, entry in state.items():
        data = bytearray(base64.b64decode(entry["data"]))
        found[name] = torch.frombuffer(data, dtype=_DTYPES[entry["dtype"]]).view(entry["shape"])
    return found
