# SPDX-License-Identifier: Apache-2.0
"""What happens inside a step of training with hot switching: tokens, senders, dropout, late layers, memory, figures."""

import re

import pytest

from tests.hot_switch.runs import COMMON, GUESTS_OF_PARTS, PARTS_OF_ROWS, arguments, many_rounds, says
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_pretrain

_tokens: list = []


def watch_tokens():
    """Note by how many tokens every step divides its gradients, and how many it meant to train."""
    from megatron_ext.hot_switch.runtime.step import SwitchingStep

    add = SwitchingStep._add_guests_gradients

    def watched(self, num_tokens):
        _tokens.append((int(num_tokens), int(self.lengths.sum())))
        add(self, num_tokens)

    SwitchingStep._add_guests_gradients = watched


def counted_tokens(model, optimizer, args):
    """What was noted."""
    return _tokens


@pytest.mark.parametrize("file", [PARTS_OF_ROWS, GUESTS_OF_PARTS], ids=["parts at home", "parts at guests"])
def test_every_token_of_a_step_counts_once(tmp_path, file):
    path = tmp_path / "strategies.yaml"
    path.write_text(file)
    command = toy_gpt(COMMON, num_layers=4, train_iters=4, hot_switch_strategy_file=str(path))
    for rank in run_pretrain(command, 4, before=watch_tokens, probe=counted_tokens):
        assert len(rank.probe) == 4
        assert all(counted == meant > 8 for counted, meant in rank.probe)
        assert len(set(rank.probe)) > 1


def chosen_senders(model, optimizer, args):
    """Who sends what to the guest."""
    from megatron_ext.hooks import hooks

    (feature,) = hooks.active[-1:]
    guest = feature._guests[0]
    assert guest._from_home._sizes.direct_bytes == (args.hot_switch_direct_bytes or 128 << 10)
    plan = guest.from_home
    return {planned.tensor.name: planned.senders.tolist() for planned in plan.tensors}


def test_senders_are_chosen_as_asked_for():
    found = [
        run_pretrain(
            arguments(["2,1,2", "1,4,1"], [32, 12, 0], train_iters=1, **{"hot_switch_algorithm": algorithm, **sizes}),
            4,
            probe=chosen_senders,
        )[0].probe
        for algorithm, sizes in (("balanced", {}), ("fcfs", {"hot_switch_direct_bytes": 1024}))
    ]
    assert found[0].keys() == found[1].keys()
    assert found[0] != found[1]


_states: list = []


def watch_generators():
    """Note the state of the generator of dropout where turns begin and end, and before and after all of them."""
    import contextlib
    import hashlib

    import torch

    from megatron_ext.hot_switch.runtime.placed_model import PlacedModel
    from megatron_ext.hot_switch.runtime.step import SwitchingStep

    turn, run = PlacedModel.turn, SwitchingStep.run

    def state():
        return hashlib.sha256(torch.cuda.get_rng_state().numpy().tobytes()).hexdigest()

    @contextlib.contextmanager
    def watched(self, *args):
        with turn(self, *args):
            begin = state()
            yield
            _states.append(("turn", begin, state()))

    def step(self, *args, **kwargs):
        before = state()
        losses = run(self, *args, **kwargs)
        _states.append(("step", before, state()))
        return losses

    PlacedModel.turn, SwitchingStep.run = watched, step


def seen_states(model, optimizer, args):
    """What was noted."""
    return _states


def test_every_turn_drops_out_by_numbers_of_its_own_and_none_of_megatrons():
    options = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 3}
    command = arguments(["2,1,1", "1,2,1", "1,1,2"], [32, 16, 8, 0], **options)
    for rank in run_pretrain(command, 2, before=watch_generators, probe=seen_states):
        turns = [(begin, end) for what, begin, end in rank.probe if what == "turn"]
        assert len(turns) == len({begin for begin, _ in turns}) == 9
        assert all(begin != end for begin, end in turns)
        steps = [(before, after) for what, before, after in rank.probe if what == "step"]
        assert len(steps) == 3
        assert all(before == after for before, after in steps)


_rounds: list = []


def watch_rounds():
    """Note at every module of a guest's first forward pass how many of its rounds have arrived, of how many."""
    from megatron_ext.hot_switch.transfer.arriving import Arriving

    require = Arriving.require

    def watched(self, units):
        require(self, units)
        _rounds.append((self._arrived, len(self._rounds)))

    Arriving.require = watched


def arrived_rounds(model, optimizer, args):
    """What was noted, and how long the last step's switches took."""
    from megatron_ext.hooks import hooks

    (feature,) = hooks.active[-1:]
    return _rounds, [done.seconds for done in feature._step.switches.done]


@pytest.mark.parametrize("profiles", [None, True])
def test_layers_are_used_while_later_ones_are_in_flight(profiles):
    command = arguments(["1,2,1", "2,1,1"], [32, 12, 0], num_layers=4, train_iters=2, hot_switch_profile=profiles)
    for rank in run_pretrain(command, 2, before=(many_rounds, watch_rounds), probe=arrived_rounds):
        noted, seconds = rank.probe
        assert all(0 < each < 60 for each in seconds) and len(seconds) == 2
        if profiles:
            assert not noted  # each switch is timed as a whole
        else:
            arrived = [count for count, _ in noted]
            assert 0 < arrived[0] < noted[0][1] / 2
            assert len(set(arrived)) > 4


def test_tensorboard_has_what_a_step_padded_trained_and_switched(tmp_path):
    pytest.importorskip("tensorboard", reason="part of the extra 'tests'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = arguments(["1,2,1", "2,1,1"], [32, 12, 0], train_iters=3, tensorboard_dir=str(tmp_path))
    (last,) = run_pretrain(command, 2)[-1:]
    events = EventAccumulator(str(tmp_path)).Reload()
    value = {
        key.removeprefix("hot-switch/"): [event.value for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
        if key.startswith("hot-switch/") and " vs samples" not in key
    }
    switches = ["seconds of parameters home -> 2,1,1", "seconds of gradients 2,1,1 -> home"]
    assert sorted(value) == sorted(["padding-ratio", "tokens", "switching-seconds", *switches])
    assert value["tokens"] == [float(tokens) for tokens in re.findall(r" tokens: (\d+)", last.stdout)]
    padding = [f"{ratio:.1%}" for ratio in value["padding-ratio"]]
    assert padding == re.findall(r" padding: (\S+)", last.stdout) and len(padding) == 3
    sums = [sum(times) for times in zip(*(value[switch] for switch in switches), strict=True)]
    assert value["switching-seconds"] == pytest.approx(sums)


_turns: list = []


def watch_turns():
    """Note what every guest holds whenever a model's turn ends."""
    from contextlib import contextmanager

    from megatron_ext.hot_switch.runtime.guest import Guest
    from megatron_ext.hot_switch.runtime.placed_model import PlacedModel

    guests, make, turn = [], Guest.__init__, PlacedModel.turn

    def made(self, *args, **options):
        make(self, *args, **options)
        guests.append(self)

    @contextmanager
    def watched(self, *args):
        with turn(self, *args):
            yield
            _turns.append((self.strategy.label, {guest.strategy.label: held_bytes(guest) for guest in guests}))

    Guest.__init__, PlacedModel.turn = made, watched


def held_bytes(guest):
    """Bytes of a guest's parameters on this rank, of its gradients, and of those that it got from another guest."""
    parameters = [entry.parameter for entry in guest.view.entries]
    if guest._own is not None:
        parameters += guest._own.views.values()
    received = guest._received.views.values() if guest._received else ()
    return tuple(
        sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for tensors in (parameters, guest.gradients().values(), received)
    )


def held_memory(model, optimizer, args):
    """What guests held at the end of all turns, and what the sums of their gradients hold when training ends."""
    from megatron_ext.hooks import hooks

    (feature,) = hooks.active[-1:]
    sums = [tensor.untyped_storage().nbytes() for tensor in feature._step._sums.views.values()]
    return _turns, sum(sums), len(sums)


@pytest.mark.parametrize(
    ("strategies", "says_so"),
    [
        (["2,1,1", "1,2,1", "1,1,2"], "of gradients to guest 1,1,2"),
        (["1,2,1", "2,1,1", "1,1,2"], "of parameters from guest 2,1,1"),
    ],
    ids=["gradients to the next guest", "parameters to the next guest"],
)
def test_guests_have_no_memory_outside_their_turns(strategies, says_so):
    command = arguments(strategies, [32, 16, 8, 0], train_iters=2, hot_switch_profile=True)
    ranks = run_pretrain(command, 2, before=watch_turns, probe=held_memory)
    assert says(ranks, says_so)
    home, *guests = strategies
    # Printed after every step: two switches of parameters, two of gradients.
    assert len(re.findall(r"parameters \S+ -> \S+: \d+\.\d\d ms, ", ranks[0].stdout)) == 4
    assert len(re.findall(r"gradients \S+ -> \S+: \d+\.\d\d ms, ", ranks[0].stdout)) == 4
    moved, sent = re.findall(r"-> home: .* ms, (\S+) MiB moved, .* at most (\S+) sent", ranks[0].stdout)[-1]
    assert 0 < float(sent) < float(moved)
    for rank in ranks:
        turns, of_sums, sums = rank.probe
        assert [label for label, _ in turns] == 2 * [*guests, home]
        for label, held in turns:
            for guest, (parameters, gradients, received) in held.items():
                assert received == 0, (label, guest)
                if guest == label:
                    assert parameters > 0 and gradients > 0
                else:
                    assert (parameters, gradients) == (0, 0), (label, guest)
        assert of_sums == 0 and sums > 10


_waits: list = []


def watch_stages():
    """Note whether the stages of whoever trains wait for all of the device when they exchange activations."""
    from megatron_ext.hot_switch.runtime import step

    train = step._forward_backward

    def watched(guest, *arguments):
        _waits.append(guest.chunks[0].config.batch_p2p_sync)
        return train(guest, *arguments)

    step._forward_backward = watched


def waits_and_buffers(model, optimizer, args):
    """What was noted, and how many memories for gathered activations the strategies have."""
    from megatron.core import parallel_state

    from megatron_ext.seams.strategies import parallel_states

    buffers = []
    for state in parallel_states():
        with state.installed():
            buffers.append(parallel_state.get_global_memory_buffer())
    return _waits, len(buffers), len(set(map(id, buffers)))


def test_guests_wait_for_no_parameters_that_come_later_and_share_homes_buffers():
    command = arguments(["2,1,1", "1,1,2", "1,2,1"], [32, 16, 8, 0], train_iters=1)
    for rank in run_pretrain(command, 2, before=watch_stages, probe=waits_and_buffers):
        assert rank.probe == ([False, False], 3, 1)
