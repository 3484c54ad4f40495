# SPDX-License-Identifier: Apache-2.0
"""What a round does to the values, without a network: formulas, order, owners, other outer optimizers."""

import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import state_name
from megatron_ext.sync_service.protocol.catalog import Catalog, TensorSpec
from megatron_ext.sync_service.protocol.frames import Frame, cut, whole_box
from megatron_ext.sync_service.values.blocks import Block
from megatron_ext.sync_service.values.contribution import Contribution
from megatron_ext.sync_service.values.decision import Decision, decide
from megatron_ext.sync_service.values.failpoints import Failpoints
from megatron_ext.sync_service.values.guards import Guards
from megatron_ext.sync_service.values.reduction import Contributor, Reduction
from megatron_ext.sync_service.values.tensor_round import TensorMade, TensorRound
from megatron_ext.sync_service.values.updates import EXACT, RESIDUAL

CATALOG = Catalog(
    [
        TensorSpec(name="w", shape=(6, 50)),
        TensorSpec(name="b", shape=()),
        TensorSpec(name="e1", shape=(4,), owners=(1,)),
    ]
)
Values = dict[str, torch.Tensor]


class Rounds:
    """Makes rounds of values in a folder."""

    def __init__(
        self,
        folder: Path,
        optimizer: OuterOptimizerConfig,
        max_norm: float | None = None,
        *,
        catalog: Catalog = CATALOG,
        penalty: LocalSGDConfig | None = None,
        reducing: GTAConfig | None = None,
    ) -> None:
        self.folder, self.optimizer, self.max_norm = folder, optimizer, max_norm
        self.catalog, self.penalty, self.reducing = catalog, penalty, reducing
        self.before: Snapshot | None = None
        self.scalars: dict[str, float] = {}
        self.number = 0
        self.sums = (0, 0)

    def make(self, *peers: Values | None, absolute: bool = True) -> tuple[Values, Decision]:
        """Make a round of the contributions of peers 0, 1, ...; None for one that is not there."""
        contributors = []
        for index, values in enumerate(peers):
            if values is None:
                continue
            contribution = Contribution(self.folder / f"{self.number}.{index}", self.catalog, "fp32")
            for name, value in values.items():
                box, flat = whole_box(self.catalog[name].shape), value.reshape(-1)
                for offset, count in cut(flat.numel(), 512):
                    contribution.append(Frame.make(name, box.shape, box, offset, flat[offset : offset + count]))
            contributors.append(Contributor(peer=f"p{index}", index=index, contribution=contribution))
        guards = None
        if self.penalty is not None:
            learned = None if self.before is None else self.before.metadata.get("guards")
            guards = Guards(self.penalty, self.catalog, self.penalty.local_sgd_workers, learned)
        reduction = Reduction(
            self.catalog,
            self.optimizer,
            codec="fp32" if absolute else "fp16",
            reducing=self.reducing,
            before=self.before,
            outer_scalars=self.scalars,
            failpoints=Failpoints(),
            number=self.number,
        )
        decision = decide(
            self.catalog,
            [(contributor.peer, contributor.index) for contributor in contributors],
            reduction.measure(contributors),
            guards=guards,
            max_norm=self.max_norm,
            is_start=self.before is None,
            work={},
        )
        if guards is not None and guards.clips and self.before is not None:
            squares = reduction.common_squares(contributors, decision)
            decision.coefficients = {key: guards.coefficient(square) for key, square in squares.items()}
        path = self.folder / f"round-{self.number}.safetensors"
        writer, made = reduction.write(path, contributors, decision)
        writer.publish()
        self.before, self.scalars, self.number = Snapshot(path), made.outer_scalars, self.number + 1
        self.sums = made.sums
        return {spec.name: self.before.read(spec.name).view(spec.shape) for spec in self.catalog}, decision


def values(seed: int, *without: str) -> Values:
    generator = torch.Generator().manual_seed(seed)
    found = {spec.name: torch.randn(spec.shape, generator=generator) for spec in CATALOG}
    return {name: value for name, value in found.items() if name not in without}


NONE = OuterOptimizerConfig(outer_optimizer="none")


def test_without_an_outer_optimizer_the_values_are_the_mean(tmp_path: Path):
    rounds = Rounds(tmp_path, NONE)
    rounds.make(values(0))
    peers = [values(1, "e1"), values(2), values(3, "e1")]
    found, outcome = rounds.make(*peers)
    for name in ("w", "b"):
        assert torch.equal(found[name], (peers[0][name] + peers[1][name] + peers[2][name]) / 3)
    assert torch.equal(found["e1"], peers[1]["e1"]) and not outcome.rejected


def test_what_an_owner_did_not_contribute_stays_and_what_it_did_is_taken_unchanged(tmp_path: Path):
    rounds = Rounds(tmp_path, OuterOptimizerConfig())
    start, _ = rounds.make(values(0))
    found, _ = rounds.make(values(1, "e1"))
    assert torch.equal(found["e1"], start["e1"]) and not torch.equal(found["w"], start["w"])
    found, _ = rounds.make(values(1, "e1"), owner := values(2))
    assert torch.equal(found["e1"], owner["e1"])


@pytest.mark.parametrize("name", ["sgd", "adam", "torch.optim.RMSprop"])
def test_outer_steps_are_those_of_torch_over_several_rounds(tmp_path: Path, name: str):
    rate = {"sgd": None, "adam": 0.01, "torch.optim.RMSprop": 0.01}[name]
    rounds = Rounds(tmp_path, OuterOptimizerConfig(outer_optimizer=name, outer_optimizer_lr=rate))
    start, _ = rounds.make(values(0))
    parameter = start["w"].clone().view(-1)
    optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam([parameter], lr=0.01),
        "torch.optim.RMSprop": lambda: torch.optim.RMSprop([parameter], lr=0.01),
    }[name]()
    for number in range(1, 4):
        peers = [values(10 * number, "e1"), values(10 * number + 1)]
        found, _ = rounds.make(*peers)
        terms = [parameter - peer["w"].view(-1) for peer in peers]
        parameter.grad = (terms[0] + terms[1]) / 2
        optimizer.step()
        torch.testing.assert_close(found["w"].view(-1), parameter, rtol=1e-5, atol=1e-6)


def test_outer_steps_follow_schedules_by_the_number_of_the_round(tmp_path: Path):
    changing = {"outer_optimizer_lr_schedule": "1:0.2,3:0.6", "outer_optimizer_momentum_schedule": "1:0.2,3:0.8"}
    rounds = Rounds(tmp_path, OuterOptimizerConfig(**changing))
    start, _ = rounds.make(values(0))
    parameter = start["w"].clone().view(-1)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.8, nesterov=True)
    for number, (lr, momentum) in enumerate([(0.2, 0.2), (0.4, 0.5), (0.6, 0.8)], start=1):
        peers = [values(10 * number, "e1"), values(10 * number + 1)]
        found, _ = rounds.make(*peers)
        terms = [parameter - peer["w"].view(-1) for peer in peers]
        parameter.grad = (terms[0] + terms[1]) / 2
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        optimizer.step()
        torch.testing.assert_close(found["w"].view(-1), parameter, rtol=1e-5, atol=1e-6)


def test_every_peer_has_a_random_mask_of_its_own_in_every_tensor_and_round_and_owners_have_none(tmp_path: Path):
    reducing = GTAConfig(reducer="gta", sparsification_method="random", density=0.5)
    catalog = Catalog([TensorSpec(name=name, shape=(1000,)) for name in ("w", "v")])
    catalog = Catalog([*catalog, TensorSpec(name="e1", shape=(4,), owners=(1,))])
    rounds = Rounds(tmp_path, NONE, catalog=catalog, reducing=reducing)
    start = {spec.name: torch.zeros(spec.shape) for spec in catalog}
    last, _ = rounds.make(start)
    masks = []
    for _ in range(2):
        moved = {name: value + 1 for name, value in last.items()}
        shared = {name: moved[name] for name in ("w", "v")}
        found, _ = rounds.make(shared, moved, shared)
        assert torch.equal(found["e1"], moved["e1"])
        for name in ("w", "v"):
            taken = ((found[name] - last[name]) * 3).round()
            assert int((taken == 0).sum()) == pytest.approx(125, abs=50)
            assert int((taken == 1).sum()) == pytest.approx(375, abs=80)
            masks.append(taken)
        last = found
    assert not any(torch.equal(first, other) for place, first in enumerate(masks) for other in masks[:place])


def test_pseudo_gradients_lead_where_values_lead(tmp_path: Path):
    found = []
    for absolute in (True, False):
        (tmp_path / str(absolute)).mkdir()
        rounds = Rounds(tmp_path / str(absolute), OuterOptimizerConfig())
        start, _ = rounds.make(values(0))
        peers = [values(1, "e1"), values(2)]
        sent = peers if absolute else [{name: start[name] - peer[name] for name in peer} for peer in peers]
        found.append(rounds.make(*sent, absolute=absolute)[0])
    for name in ("w", "b"):
        # Peers get what fp16 can say of it; the rest comes with the next round.
        exact = rounds.before.read(state_name(EXACT, name)).view(found[1][name].shape)
        assert not torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0]["e1"], found[1]["e1"], rtol=1e-6, atol=1e-6)


def test_a_snapshot_of_an_earlier_release_keeps_what_its_updates_had_lost(tmp_path: Path):
    found = []
    for earlier in (False, True):
        (tmp_path / str(earlier)).mkdir()
        rounds = Rounds(tmp_path / str(earlier), OuterOptimizerConfig())
        start, _ = rounds.make(values(0))
        rounds.make({name: 0.3 * value for name, value in start.items()}, absolute=False)
        if earlier:
            tensors = load_file(rounds.before.path)
            for name in ("w", "b"):
                exact = tensors.pop(state_name(EXACT, name))
                tensors[state_name(RESIDUAL, name)] = exact - tensors[name]
            save_file(tensors, tmp_path / "earlier.safetensors", {"format": "pt"})
            rounds.before = Snapshot(tmp_path / "earlier.safetensors")
        found.append(rounds.make({name: 0.7 * value for name, value in start.items()}, absolute=False)[0])
        exact = rounds.before.read(state_name(EXACT, "w")).view(start["w"].shape)
        assert not torch.equal(exact, found[-1]["w"])
    torch.testing.assert_close(found[0]["w"], found[1]["w"], rtol=1e-5, atol=1e-5)


def test_norms_are_over_what_a_peer_trains_and_too_large_ones_do_not_count(tmp_path: Path):
    rounds = Rounds(tmp_path, NONE, max_norm=1.0)
    start, _ = rounds.make(values(0))
    near = {"w": start["w"] + 0.01, "b": start["b"].clone()}
    far = {"w": start["w"] + 0.5, "b": start["b"], "e1": start["e1"]}
    found, outcome = rounds.make(near, far)
    assert outcome.norms == pytest.approx({"p0": 0.01 * 300**0.5, "p1": 0.5 * 300**0.5}, rel=1e-4)
    assert list(outcome.rejected) == ["p1"] and "max_norm is 1" in outcome.rejected["p1"]
    assert torch.equal(found["w"], near["w"])


def test_every_thread_of_a_round_has_one_of_torchs_and_the_process_has_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server is started without OMP_NUM_THREADS: each product of vectors would otherwise be made by a whole team."""
    found: list[int] = []
    make = TensorRound.make

    def seen(*arguments: Any, **options: Any) -> TensorMade:
        found.append(torch.get_num_threads())
        return make(*arguments, **options)

    monkeypatch.setattr(TensorRound, "make", seen)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Rounds(tmp_path, NONE).make(values(1))
        assert found == [1] * len(CATALOG)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_round_that_cannot_be_written_leaves_nothing(tmp_path: Path):
    rounds = Rounds(tmp_path, NONE)
    rounds.make(values(0))

    class Full(Failpoints):
        def hit(self, name: str) -> None:
            raise OSError(28, "the disk is full")

    contribution = Contribution(tmp_path / "c", CATALOG, "fp32")
    for name, value in values(1, "e1").items():
        box = whole_box(CATALOG[name].shape)
        contribution.append(Frame.make(name, box.shape, box, 0, value.reshape(-1)))
    contributors = [Contributor(peer="p0", index=0, contribution=contribution)]
    reduction = Reduction(CATALOG, NONE, codec="fp32", before=rounds.before, outer_scalars={}, failpoints=Full())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="the disk is full"):
        reduction.write(tmp_path / "round-1.safetensors", contributors, Decision())
    assert sorted(tmp_path.iterdir()) == before


class Watched(Contribution):
    """Counts how many tensors that it has read are in memory at once, over all contributions."""

    alive: ClassVar[dict[str, list[weakref.ref[torch.Tensor]]]] = {}
    most: ClassVar[int] = 0

    def read(self, spec: TensorSpec, at: Block | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        values = super().read(spec, at, out)
        # Several tensors are made at a time.
        before = Watched.alive.get(spec.name, [])
        Watched.alive[spec.name] = [found for found in before if found() is not None] + [weakref.ref(values)]
        Watched.most = max(Watched.most, len(Watched.alive[spec.name]))
        return values


@pytest.mark.parametrize("optimizer", [NONE, OuterOptimizerConfig()], ids=["none", "sgd"])
def test_two_contributions_to_a_tensor_are_in_memory_at_a_time_whatever_the_number_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: OuterOptimizerConfig
):
    monkeypatch.setattr("tests.sync_service.values.test_reduction.Contribution", Watched)
    rounds = Rounds(tmp_path, optimizer)
    rounds.make(values(0))
    Watched.most = 0
    rounds.make(*(values(number, *(["e1"] if number != 1 else [])) for number in range(8)))
    assert Watched.most == 2
