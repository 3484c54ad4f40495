# SPDX-License-Identifier: Apache-2.0
"""SPES peers resume from the checkpoint of a job that trained all experts, each with the moments of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.spes.test_feature import MODEL, OWNED, RUN, SPES, expert_of
from tests.support.every_run import one_of_each
from tests.support.pretrain import RankOutcome, run_pretrain
from tests.sync_service.jobs import ALONE, failing_job, job_arguments, start_job
from tests.sync_service.service import Service

MakeService = Callable[..., Service]
STEPS = 4
STOCK = {**ALONE, "global_batch_size": 8}
RESHARDABLE = {"dist_ckpt_optim_fully_reshardable": True}


def moments(model, optimizer, args):
    """Probe: return the moments of this rank's experts and of everything else, by global name."""
    from megatron_ext.params import ParameterView
    from megatron_ext.seams.optimizer import InnerValues

    values, found = InnerValues(optimizer, ParameterView.from_model(model)), {}
    states = {
        tensor.data_ptr(): state for member in values.members for tensor, state in member.optimizer.state.items()
    }
    for value in values.values:
        state = states[value.tensor.data_ptr()]
        found[value.entry.tensor.name] = {
            name: state[name].detach().flatten().clone() for name in ("exp_avg", "exp_avg_sq")
        } | {"step": torch.as_tensor(_step(state, values.members[value.member])).float()}
    return found


def _step(state: dict[str, Any], member: Any) -> Any:
    return state["step"] if "step" in state else member.optimizer.param_groups[0]["step"]


def by_name(ranks: list[RankOutcome]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: found for rank in ranks for name, found in rank.probe.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    one_of_each(
        [
            (("single", "fp32", 1), {}),
            (("single", "bf16", 1), {}),
            (("single", "bf16-distopt", 1), RESHARDABLE),
            (("moe-ep2", "bf16-distopt", 2), RESHARDABLE),
        ],
        {1, 3},
    ),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_every_peer_takes_the_moments_of_what_it_trains(
    make_service: MakeService, tmp_path: Path, kind: tuple[str, str, int], options: dict[str, Any]
):
    service = make_service({"demo": RUN})
    service.start()
    saved = str(tmp_path / "stock")
    common = {**MODEL, **options, "train_iters": STEPS}
    arguments = job_arguments(service, "none", kind, **common, **STOCK, save=saved, save_interval=STEPS)
    stock = by_name(run_pretrain(arguments, kind[2], patch="backend-only", probe=moments))
    jobs = [
        start_job(service, name, kind, probe=moments, load=saved, sync_service_index=index, **{**SPES, **common})
        for index, name in enumerate("ab")
    ]
    for name, job in zip("ab", jobs, strict=True):
        found = by_name(job.result())
        assert {expert_of(tensor) for tensor in found} == {None, *OWNED[name]}
        for tensor, states in found.items():
            for state, value in states.items():
                assert torch.equal(value, stock[tensor][state]), (name, tensor, state)
            assert states["step"] == STEPS and states["exp_avg"].any(), (name, tensor)


def test_a_form_of_state_that_does_not_tell_experts_apart_is_refused(make_service: MakeService, tmp_path: Path):
    service = make_service({"demo": RUN})
    service.start()
    kind, saved = ("single", "bf16-distopt", 1), str(tmp_path / "stock")
    arguments = job_arguments(service, "none", kind, **MODEL, **STOCK, train_iters=STEPS, save=saved, save_interval=4)
    run_pretrain(arguments, 1, patch="backend-only")
    said = failing_job(service, "a", kind, load=saved, sync_service_index=0, **SPES)
    assert "its state's form (dp_reshardable) does not tell them apart" in said
    assert "--dist-ckpt-optim-fully-reshardable" in said and "--no-load-optim" in said
