# SPDX-License-Identifier: Apache-2.0
"""Local SGD's state without Megatron: saved by itself, taken over by what fits, refused by what does not."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

from tests.local_sgd.engines import pairs
from tests.local_sgd.plain_runs import flat, model, said_by, train, wrapped
from tests.support.distributed import run_ranks


def saved_and_loaded(folder):
    from megatron_ext.local_sgd.plain_torch import load_local_sgd_state_dict, save_local_sgd_state_dict

    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=2)
    train(module, optimizer, 5, dist.get_rank())
    save_local_sgd_state_dict(optimizer, folder)
    other = model()
    fresh = wrapped(torch.optim.SGD(other.parameters(), lr=0.1), other, interval=2)
    other.load_state_dict(module.state_dict())
    load_local_sgd_state_dict(fresh, folder)
    train(module, optimizer, 8, dist.get_rank(), start=5)
    train(other, fresh, 8, dist.get_rank(), start=5)
    return flat(module), flat(other)


def test_local_sgds_state_can_be_saved_by_itself(tmp_path):
    for straight, other in run_ranks(saved_and_loaded, 2, str(tmp_path / "new")):
        assert straight == other


def loaded_from_a_cut_off_save():
    """Return what is said when worker 0 has the state of a later step than worker 1."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=4)
    states = []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        train(module, optimizer, stop, dist.get_rank(), start=start)
        states.append(optimizer.averager.state_dict())
    said = []
    for later in states[1:]:
        try:
            optimizer.averager.load_state_dict(states[0] if dist.get_rank() else later)
        except UserError as error:
            said.append(str(error))
    return said


def test_files_of_different_saves_are_refused():
    begin = "local SGD's saved state: the workers' files are of different saves (worker 0: round "
    for said in run_ranks(loaded_from_a_cut_off_save, 2):
        assert said == [
            begin + "1, step 7, worker 1: round 1, step 6); load those of one save",
            begin + "2, step 9, worker 1: round 1, step 6); load those of one save",
        ]


def refused_loads(folder):
    """Return what is said to states that are none, and whether the inner optimizer's state has stayed as it was."""
    from pathlib import Path

    from megatron_ext.errors import UserError
    from megatron_ext.local_sgd.plain_torch import load_local_sgd_state_dict

    dist.init_process_group("gloo")
    module = model()
    other = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module)
    train(module, other, 3, dist.get_rank())
    state = other.state_dict()
    optimizer = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module, codec="int8")
    Path(folder, f"junk_rank{dist.get_rank()}.pt").write_bytes(b"no")
    said = []
    for load in (
        lambda: optimizer.load_state_dict({key: value for key, value in state.items() if key != "local_sgd"}),
        lambda: optimizer.load_state_dict({**state, "local_sgd": {"step": 1}}),
        lambda: optimizer.load_state_dict(state),
        lambda: load_local_sgd_state_dict(optimizer, folder, "junk"),
    ):
        try:
            load()
        except UserError as error:
            said.append(str(error))
    return said, len(optimizer.optim.state)


def test_a_load_that_is_refused_has_taken_nothing_over(tmp_path):
    for (without, empty, otherwise, junk), states in run_ranks(refused_loads, 2, str(tmp_path)):
        assert "the optimizer's state has none of local SGD's" in without
        assert "local SGD's saved state: it has no 'common', so it is none" in empty
        assert ": codec was not given in the run that saved it" in otherwise
        assert "cannot be read as local SGD's state" in junk
        assert states == 0


OTHERWISE = {
    "codec": ({"codec": "int8"}, "codec was not given in the run that saved it, and is 'int8' now"),
    "reducer": ({"gta": {"reducer": "gta"}}, ": reducer was not given"),
    "outer optimizer": (
        {"outer": {"outer_optim_class": torch.optim.Adam, "outer_optim_kwargs": {"lr": 0.1}}},
        "; outer_optim_class was not given in the run that saved it, and is 'torch.optim.adam.Adam' now",
    ),
    "fragments": ({"streaming": {"fragments": 2}}, ": fragments was 1 in the run that saved it, and is 2"),
    "clock": ({"use_async": True, "interval": 1}, ": use_async was False in the run that saved it, and is True now"),
    "model": ({}, "0.weight has the shape [16, 8] there and [2, 8] here"),
}


def taken_over_otherwise():
    """Return by what is different what a run says that takes over another one's state."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    module = model()
    state = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module).state_dict()
    said = {}
    for what, (fields, _) in OTHERWISE.items():
        other = torch.nn.Sequential(torch.nn.Linear(8, 2)) if what == "model" else model()
        optimizer = wrapped(torch.optim.Adam(other.parameters(), lr=0.01), other, **{"interval": 2, **fields})
        try:
            optimizer.averager.load_state_dict(state["local_sgd"])
        except UserError as error:
            said[what] = str(error)
    return said


def taken_over_with_other_tuning():
    """Return what is said, and the error, where a schedule or a weighting changes on the way."""
    from contextlib import redirect_stdout
    from io import StringIO

    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    found = []
    fragments = {"fragments": 2, "sync_delay": 2}
    for steps, before, after in (
        (3, {"streaming": fragments, "interval": 4}, {"streaming": fragments, "interval": 6}),
        (2, {"interval": 2, "skip_anomaly": True}, {"interval": 3, "skip_anomaly": True, "outer": OUTER}),
        (2, {"interval": 2, "skip_anomaly": True}, {"interval": 2, "skip_anomaly": True, "ewma_warmup_steps": 3}),
    ):
        module = model()
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, **before)
        train(module, optimizer, steps, dist.get_rank())
        state = optimizer.averager.state_dict()
        other = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, warmup=100, **after)
        out, error = StringIO(), ""
        try:
            with redirect_stdout(out):
                other.averager.load_state_dict(state)
        except UserError as refusal:
            error = str(refusal)
        found.append((out.getvalue(), error))
    return found


OUTER = {"outer_optimizer_lr": 0.5}


def test_what_changes_on_the_way_is_said_and_refused_where_it_would_cut_a_round_short():
    for number, (streamed, tuned, detector) in enumerate(run_ranks(taken_over_with_other_tuning, 2)):
        refused = "local SGD's saved state: saved while rounds of fragments were in flight, so that "
        assert streamed == ("", refused + "local_sgd_sync_interval has to be 4, not 6; load a state without any")
        lines = [line.partition("local SGD: ")[2] for line in tuned[0].splitlines()]
        expected = [
            "local_sgd_sync_interval was 2 in the run that saved, and is 3 from here on",
            "outer_optimizer_lr was 0.7 in the run that saved, and is 0.5 from here on",
        ]
        assert tuned[1] == "" and lines == (expected if number == 0 else [])
        assert detector[1].endswith("resume with ewma_warmup_steps 120, or start without its experience")


def exchanged():
    """Return what a worker says to the file of the other one."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    module = model()
    averager = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, skip_anomaly=True).averager
    states = [None, None]
    dist.all_gather_object(states, averager.state_dict())
    try:
        averager.load_state_dict(states[1 - dist.get_rank()])
    except UserError as error:
        return str(error)
    return ""


def test_the_state_of_another_worker_is_refused():
    first, second = run_ranks(exchanged, 2)
    begin = "local SGD's saved state: it is that of worker"
    way_out = "give every rank what it saved itself"
    assert first == f"{begin} 1, rank 0 of its ranks, and this is worker 0, rank 0; {way_out}"
    assert second.startswith(f"{begin} 0, ")


def through_torchs_checkpoint_api():
    """Return the refusal of the wrapped optimizer there, steps counted, and whether the inner one's state stays."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    module = model()
    optimizer = wrapped(torch.optim.Adam(module.parameters(), lr=0.01), module)
    said = []

    def tried(act):
        try:
            act()
        except UserError as error:
            said.append(str(error))

    tried(lambda: get_optimizer_state_dict(module, optimizer))
    train(module, optimizer, 2, dist.get_rank())
    tried(lambda: get_optimizer_state_dict(module, optimizer))
    state = get_optimizer_state_dict(module, optimizer.optim)
    tried(lambda: set_optimizer_state_dict(module, optimizer, state))
    other = model()
    inner = torch.optim.Adam(other.parameters(), lr=0.01)
    set_optimizer_state_dict(other, inner, state)
    same = all(
        torch.equal(optimizer.optim.state[mine]["exp_avg"], inner.state[its]["exp_avg"])
        for mine, its in zip(module.parameters(), other.parameters(), strict=True)
    )
    return said, optimizer.averager.step, same


def test_torchs_checkpoint_api_gets_the_inner_optimizer():
    for said, steps, same in run_ranks(through_torchs_checkpoint_api, 2):
        assert len(said) == 3 and steps == 2 and same
        assert all("leaves local SGD's state out; give it the inner optimizer (optimizer.optim)" in one for one in said)


def taken_over_in_another_order():
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    module = model()
    averager = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module).averager
    state = averager.state_dict()
    state["parameters"] = dict(reversed(state["parameters"].items()))
    try:
        averager.load_state_dict(state)
    except UserError as error:
        return str(error)
    return ""


def test_a_state_in_another_order_is_refused():
    for said in run_ranks(taken_over_in_another_order, 2):
        assert said == "local SGD's saved state: its parameters are in another order than the model's; start without it"


def taken_over_by_fewer():
    """Return what two workers say to the states of four: of a run in mid-interval, after a round, with a detector."""
    from megatron_ext.errors import UserError

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    said = []
    for steps, fields in ((1, {}), (2, {}), (2, {"skip_anomaly": True})):
        module = model()
        optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=2, **fields)
        train(module, optimizer, steps, dist.get_rank())
        state = optimizer.averager.state_dict()
        fewer = wrapped(
            torch.optim.SGD(module.parameters(), lr=0.1),
            module,
            interval=2,
            warmup=100,  # workers in mid-interval are not equal
            groups=(pairs[dist.get_rank() // 2], None),
            **fields,
        )
        try:
            fewer.averager.load_state_dict(state)
            said.append(fewer.averager.state_dict()["step"])
        except UserError as error:
            said.append(str(error))
    return said


def test_another_number_of_workers_resumes_where_all_are_equal_and_is_refused_elsewhere():
    begin = "local SGD's saved state: saved by 4 workers, each with something of its own, and process_group has 2; "
    for between, after, with_detector in run_ranks(taken_over_by_fewer, 4):
        assert between == begin + "continue with 4, save after a round and load that, or start without it"
        assert after == 2
        assert with_detector == begin + "continue with 4, or start without it"


def test_the_state_of_another_method_or_model_is_refused_by_name():
    for said in run_ranks(taken_over_otherwise, 2):
        for what, (_, expected) in OTHERWISE.items():
            assert expected in said[what]


def beside_other_weights(steps):
    """Return what is said where worker 1 loads a state beside the weights of another time, and what was taken over."""
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=3)
    train(module, optimizer, steps, rank)
    weights, state = {name: value.clone() for name, value in module.state_dict().items()}, optimizer.state_dict()
    fresh_module = model()
    fresh = wrapped(torch.optim.SGD(fresh_module.parameters(), lr=0.1), fresh_module, interval=3)
    if rank != 1:
        fresh_module.load_state_dict(weights)
    refused = said_by(lambda: fresh.load_state_dict(state)), fresh.averager.step
    fresh_module.load_state_dict(weights)
    return refused, said_by(lambda: fresh.load_state_dict(state)), fresh.averager.step


@pytest.mark.parametrize("steps", [3, 4], ids=["after a round", "in mid-interval"])
def test_a_state_without_the_weights_it_belongs_to_is_refused_on_all_workers(steps):
    own = (
        "local SGD's saved state: it belongs to other weights than the module has, which differ in 0.weight (and in 5 "
        "more parameters); load the module's weights of the same save first, then this state"
    )
    for number, ((said, taken), fitting, after) in enumerate(run_ranks(beside_other_weights, 3, steps, timeout=60)):
        assert said == (own if number == 1 else f"worker 1: {own}")
        assert (taken, fitting, after) == (0, "", steps)


def of_an_earlier_release():
    """Return what is said of a state that does not tell its weights, and the steps after it was loaded."""
    dist.init_process_group("gloo")
    module, said = model(), io.StringIO()
    optimizer = wrapped(torch.optim.SGD(module.parameters(), lr=0.1), module, interval=3)
    train(module, optimizer, 3, dist.get_rank())
    state = optimizer.averager.state_dict()
    del state["weights"]
    with contextlib.redirect_stdout(said):
        optimizer.averager.load_state_dict(state)
    return said.getvalue(), optimizer.averager.step


def test_a_state_of_an_earlier_release_is_loaded_with_a_line_that_its_weights_are_not_checked():
    (said, steps), (nothing, same) = run_ranks(of_an_earlier_release, 2)
    assert steps == same == 3
    assert said.splitlines() == [
        "> megatron_ext: local SGD: the saved state is of an earlier release and does not say to which weights it "
        "belongs; they are not checked"
    ]
    assert nothing == ""


def saves_of_a_workers_ranks():
    """Return what is said where the second ranks of all workers have the state of a later step than the first."""
    groups = pairs()
    value = torch.nn.Parameter(torch.zeros(4))
    optimizer = wrapped(torch.optim.SGD([value], lr=1.0), groups=groups, interval=4)
    states = []
    for _ in range(2):
        optimizer.step()
        states.append(optimizer.averager.state_dict())
    return said_by(lambda: optimizer.averager.load_state_dict(states[dist.get_rank() % 2]))


def test_files_of_different_saves_are_refused_where_the_ranks_of_a_worker_differ():
    for said in run_ranks(saves_of_a_workers_ranks, 4, timeout=60):
        assert said == (
            "local SGD's saved state: the workers' files are of different saves (worker 0, rank 0: round 0, step 1, "
            "worker 0, rank 1: round 0, step 2, worker 1, rank 0: round 0, step 1, worker 1, rank 1: round 0, step 2); "
            "load those of one save"
        )


def with_other_shards():
    """Return what is said where every rank is a worker, of a state that workers of two ranks have saved."""
    value = torch.nn.Parameter(torch.zeros(4))
    state = wrapped(torch.optim.SGD([value], lr=1.0), groups=pairs()).averager.state_dict()
    averager = wrapped(torch.optim.SGD([value], lr=1.0)).averager
    return said_by(lambda: averager.load_state_dict(state))


def test_a_state_of_another_number_of_shards_is_refused_as_such():
    own = "local SGD's saved state: saved where the model was cut over 2 ranks, and shard_group has 1; continue with 2"
    for said in run_ranks(with_other_shards, 4, timeout=60):
        assert own in said
