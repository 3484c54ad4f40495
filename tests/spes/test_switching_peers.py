# SPDX-License-Identifier: Apache-2.0
"""SPES peers with hot switching, and with workers inside: what others own is frozen under every strategy."""

import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.errors import UserError
from megatron_ext.spes.arguments import argument_problems
from megatron_ext.spes.feature import SpesFeature
from tests.spes.test_arguments import FLAGS, completed
from tests.spes.test_feature import MODEL, RUN, expert_of, watch_steps
from tests.support.presets import Options
from tests.support.pretrain import RankOutcome, run_failing_pretrain
from tests.support.waiting import until
from tests.sync_service.jobs import (
    die_in_step,
    has_joined,
    job_arguments,
    model_of,
    run_job,
    same_bits,
    start_job,
    values_held,
)
from tests.sync_service.service import Service, Zygote

# With two expert parallel ranks one of them has no expert of the peer's to train.
STRATEGIES = {
    "a": """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 2, tp: 1, pp: 1}
  - {dp: 1, tp: 2, pp: 1, ep: 2, etp: 1, sequence_parallel: true}
  - {dp: 1, tp: 1, pp: 2}
""",
    "b": """
bucket_sizes: [32, 12, 0]
strategies:
  - {dp: 1, tp: 2, pp: 1, sequence_parallel: true}
  - {dp: 2, tp: 1, pp: 1, ep: 2}
""",
}
OWNED = {"a": (0, 1), "b": (2, 3)}
COMMON: Options = {
    **MODEL,
    "using_spes": True,
    "spes_num_train_experts_per_node": 2,
    "spes_using_decayed_aux_loss": True,
    "moe_aux_loss_coeff": 1.0,
    "vocab_size": 127,
    "make_vocab_size_divisible_by": 8,
    "lr": 1e-3,
}
OVERLAPPED: Options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PAIR, ALONE = ("single", "fp32", 2), ("single", "fp32", 1)


def pack_nothing() -> None:
    """Before: give every document a row of its own; the balancing loss depends on what shares a micro-batch."""
    from megatron_ext.hot_switch.data import packing

    packing.first_fit_decreasing = lambda lengths, capacity: [[item] for item in range(len(lengths))]


def values_and_guests(model, optimizer, args):
    """Probe: what `values_held` says, what each step has done, and by guest what has gradients there."""
    from megatron_ext.hooks import hooks

    (guests,) = [feature._guests for feature in hooks.active if feature.name == "hot-switch"]
    told = []
    for guest in guests:
        gradients = {
            entry.tensor.name: math.prod(entry.slice.local_shape)
            for entry in guest.view.entries
            if getattr(entry.parameter, "main_grad", None) is not None
        }
        buffers = [buffer for chunk in guest.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        moved = [{planned.tensor.name for planned in plan.tensors} for plan in (guest.from_home, guest.to_home)]
        told.append((gradients, sum(buffer.numel for buffer in buffers), *moved))
    return (*values_held(model, optimizer, args), getattr(args, "steps_seen", []), told)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What the runs have computed, by peer."""

    switched: dict[str, list[RankOutcome]]
    """With guests; peer a was killed after its seventh step and resumed from a checkpoint after its sixth."""

    killed: str
    """What the last rank of a has said before it was killed."""

    alone: dict[str, list[RankOutcome]]
    """Without guests, on one rank each."""


@pytest.fixture(scope="module")
def runs(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("switching")
    watched = {"before": (pack_nothing, watch_steps), "probe": values_and_guests}
    services = []
    for name in ("switched", "alone"):
        (folder / name).mkdir()
        services.append(Service(zygote, folder / name, {"demo": RUN}))
        services[-1].start()
    switched, alone = services
    options = {}
    for index, name in enumerate("ab"):
        file = folder / f"{name}.yaml"
        file.write_text(STRATEGIES[name])
        options[name] = {**COMMON, "sync_service_index": index, "hot_switch_strategy_file": str(file)}
    options["a"] |= {**OVERLAPPED, "save": str(folder / "a"), "save_interval": 6}
    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(
            run_failing_pretrain,
            job_arguments(switched, "a", PAIR, **options["a"]),
            2,
            before=(pack_nothing, die_in_step(7)),
            timeout=120,
        )
        # Its weights begin the run; those of another home would be others.
        until(lambda: has_joined(switched), "the first peer")
        other = start_job(switched, "b", PAIR, **watched, **options["b"])
        one = {"hot_switch_strategies": ["1,1,1"], "hot_switch_bucket_sizes": [32, 0]}
        by_themselves = {
            name: start_job(alone, name, ALONE, before=pack_nothing, **COMMON, **one, sync_service_index=index)
            for index, name in enumerate("ab")
        }
        killed = dying.result()[-1].stdout
    again = run_job(switched, "a", PAIR, **watched, **options["a"], load=str(folder / "a"))
    yield Runs(
        switched={"a": again, "b": other.result()},
        killed=killed,
        alone={name: job.result() for name, job in by_themselves.items()},
    )
    for service in services:
        service.stop()


@pytest.mark.slow
def test_peers_with_guests_compute_what_peers_without_do(runs: Runs):
    for name, ours in runs.switched.items():
        theirs, steps = runs.alone[name], slice(6 if name == "a" else 0, 8)
        assert len(ours[-1].losses) == len(theirs[-1].losses[steps])
        assert ours[-1].losses == pytest.approx(theirs[-1].losses[steps], rel=0, abs=1e-5)
        assert ours[0].grad_norms == pytest.approx(theirs[0].grad_norms[steps], rel=1e-4)
        mine, others = model_of(ours), model_of(theirs)
        assert mine.keys() == others.keys()
        apart = max((float(np.abs(mine[name] - others[name]).max()), name) for name in mine)
        assert apart[0] <= 1e-4, apart


def test_after_a_round_peers_with_different_strategies_have_the_same_bits(runs: Runs):
    assert same_bits(*map(model_of, runs.switched.values()))


def test_a_killed_peer_with_guests_resumes_in_mid_interval_with_the_same_loss(runs: Runs):
    again = runs.switched["a"]
    assert "part 0 of 2 of the samples, 2 steps after round 1" in again[0].stdout
    line = r" iteration +7/ +8 .* lm loss: (\S+) .* grad norm: (\S+)"
    before, after = (re.search(line, said) for said in (runs.killed, again[-1].stdout))
    assert before and after and before.groups() == after.groups()


def test_what_a_peer_does_not_own_stays_as_it_is_until_the_next_round(runs: Runs):
    for name, ranks in runs.switched.items():
        changed = {}
        for rank in ranks:
            for step, (names, _) in enumerate(rank.probe[3]):
                changed.setdefault(step, set()).update(map(expert_of, names))
        assert len(changed) == (2 if name == "a" else 8)
        assert all(experts == {None, *OWNED[name]} for experts in changed.values())


def test_guests_have_gradients_of_what_is_trained_alone_and_send_those_home(runs: Runs):
    for name, ranks in runs.switched.items():
        owned = {None, *OWNED[name]}
        for guest in zip(*(rank.probe[4] for rank in ranks), strict=True):
            graded = [set(map(expert_of, gradients)) for gradients, *_ in guest]
            assert all(experts <= owned for experts in graded) and set.union(*graded) == owned
            for gradients, held, there, back in guest:
                assert held == sum(gradients.values()) > 0
                assert set(map(expert_of, there)) == {None, 0, 1, 2, 3}
                assert set(map(expert_of, back)) == owned


def test_home_needs_an_expert_to_train_on_every_rank():
    args = completed(**FLAGS)
    assert argument_problems(args) == []
    # As hot switching says for the first strategy of a file, after all arguments have been checked.
    args.expert_model_parallel_size = 2
    SpesFeature().adjust_arguments(args)
    args.hot_switch_strategy_file = "strategies.yaml"
    with pytest.raises(UserError, match=r"hot-switch-strategy-file.* rank 1 would have no expert of this peer's"):
        SpesFeature().adjust_arguments(args)


@pytest.mark.slow
def test_workers_peers_and_strategies_in_one_run(make_service: Callable[..., Service], tmp_path: Path):
    workers = {"use_local_sgd": True, "local_sgd_workers": 2, "local_sgd_sync_interval": 2}
    options = {**COMMON, **workers, "sequence_parallel": True, "before": pack_nothing}
    listed = {
        "hot": {"hot_switch_strategies": ["1,1,2", "1,2,1", "2,1,1"], "hot_switch_bucket_sizes": [32, 16, 8, 0]},
        "static": {"hot_switch_strategies": ["1,1,2"], "hot_switch_bucket_sizes": [32, 0]},
    }
    plain = {"hot_switch_strategies": ["1,1,1"], "hot_switch_bucket_sizes": [32, 0], "before": pack_nothing}
    found = []
    # In mid-interval of workers and peers; what is not distributed has the experts' states as Megatron stacks them.
    saving = {"save": str(tmp_path), "save_interval": 7}
    for strategies in listed.values():
        service = make_service({"demo": RUN})
        service.start()
        first = start_job(service, "a", ("single", "fp32", 4), sync_service_index=0, **options, **strategies, **saving)
        until(lambda service=service: has_joined(service), "the first peer, whose weights begin the run")
        other = start_job(service, "b", ALONE, sync_service_index=1, **COMMON, **plain)
        found.append(first.result())
        # `model_of` sees to it that all workers hold the same bits.
        assert same_bits(model_of(found[-1]), model_of(other.result()))
    hot, static = found
    assert (tmp_path / "iter_0000007").is_dir()
    assert hot[-1].losses == pytest.approx(static[-1].losses, rel=0, abs=1e-5)
    mine, theirs = model_of(hot), model_of(static)
    assert max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine) <= 1e-4
