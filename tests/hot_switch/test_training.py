# SPDX-License-Identifier: Apache-2.0
"""Training with hot switching computes what stock Megatron computes on the same documents."""

import re

import pytest

from tests.hot_switch.runs import (
    COMMON,
    arguments,
    assert_equal_but_for_rounding,
    full_parameters,
    hot_run,
    losses,
    many_rounds,
    one_document_per_row,
    same_weights,
    stock_run,
    tell_padding,
)
from tests.support.presets import LATENT, MOE, PRECISIONS, toy_gpt
from tests.support.pretrain import run_pretrain

LLAMA = {
    "swiglu": True,
    "no_bias_swiglu_fusion": True,
    "no_rope_fusion": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}


def says(ranks, text):
    """Whether the run's first rank printed a text."""
    return text in ranks[0].stdout


@pytest.mark.parametrize(
    ("strategies", "passes_on", "options"),
    [
        (["1,2,2", "4,1,1", "2,1,2"], False, {}),
        (["2,2,1", "1,4,1", "1,2,2"], True, {**LLAMA, "use_distributed_optimizer": True, "sequence_parallel": True}),
    ],
    ids=["tp and pp at home", "distributed optimizer and sequence parallel"],
)
def test_hot_equals_static(strategies, passes_on, options):
    hot = hot_run(strategies, [32, 16, 8, 0], **options)
    stock = stock_run(strategies[0], **options)
    assert_equal_but_for_rounding(hot, stock)
    assert says(hot, "of gradients to guest 1,2,2") == passes_on


INTERLEAVED = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 2, pp: 2, vpp: 2, first_stage_layers: 4, sequence_parallel: true, recompute: full}
  - {dp: 4, tp: 1, pp: 1, micro_batch_size: 2}
  - {dp: 2, tp: 1, pp: 2, vpp: 2, last_stage_layers: 4, recompute: selective}
"""


def test_interleaved_and_uneven_stages_rows_and_recomputation_of_each_strategy_change_nothing(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(INTERLEAVED)
    options = {"num_layers": 6}
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    stages = {"num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 4}
    stock = stock_run("1,2,2", **stages, sequence_parallel=True, **options)
    assert_equal_but_for_rounding(hot, stock)


PARTS_OF_ROWS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 1, tp: 1, pp: 2, cp: 2}
  - {dp: 4, tp: 1, pp: 1}
  - {dp: 1, tp: 2, pp: 1, cp: 2, sequence_parallel: true, recompute: full}
"""
GUESTS_OF_PARTS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 2, tp: 1, pp: 2}
  - {dp: 1, tp: 1, pp: 1, cp: 4, recompute: selective}
  - {dp: 1, tp: 1, pp: 2, vpp: 2, cp: 2, micro_batch_size: 2}
"""


@pytest.mark.parametrize(
    ("strategies", "home", "options"),
    [
        (PARTS_OF_ROWS, "2,1,2", {**LLAMA, "use_distributed_optimizer": True, "num_layers": 4}),
        (GUESTS_OF_PARTS, "2,1,2", {"num_layers": 4}),
        (PARTS_OF_ROWS, "2,1,2", {**LATENT, "use_distributed_optimizer": True}),
    ],
    ids=["home and a guest", "guests only", "latent attention"],
)
def test_context_parallelism_changes_nothing(tmp_path, strategies, home, options):
    file = tmp_path / "strategies.yaml"
    file.write_text(strategies)
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    assert_equal_but_for_rounding(hot, stock_run(home, **options))


EXPERTS = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {dp: 4, tp: 1, pp: 1, ep: 2}
  - {dp: 2, tp: 1, pp: 2, ep: 1}
  - {dp: 2, tp: 2, pp: 1, ep: 4, etp: 1, sequence_parallel: true}
"""


def test_experts_on_other_ranks_for_each_strategy_change_nothing(tmp_path):
    file = tmp_path / "strategies.yaml"
    file.write_text(EXPERTS)
    options = {**MOE, "moe_aux_loss_coeff": 0.0, "use_distributed_optimizer": True}
    # Unlike the balancing loss this one does not depend on what shares a micro-batch.
    options["moe_z_loss_coeff"] = 0.1
    # Megatron 0.19 fails on experts with biases whose tensor parallel size differs from that of the rest.
    options["disable_bias_linear"] = True
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=many_rounds)
    stock = stock_run("4,1,1", tell_padding, expert_model_parallel_size=2, **options)
    assert_equal_but_for_rounding(hot, stock)
    assert says(hot, "of gradients to guest 2,2,1")


BALANCED = """
bucket_sizes: [32, 16, 8, 0]
strategies:
  - {HOME, tp: 1, pp: 1, ep: 2}
  - {dp: 1, tp: 2, pp: 2, ep: 2, etp: 1, sequence_parallel: true, recompute: full}
  - {dp: 1, tp: 2, pp: 1, cp: 2, ep: 4, etp: 1, sequence_parallel: true}
"""


def reported(ranks, name):
    """The values of a loss that the log lines give."""
    return [float(value) for value in re.findall(rf" {name}: (\S+)", ranks[-1].stdout)]


@pytest.mark.parametrize("home", ["dp: 4", "dp: 2, cp: 2"])
def test_losses_of_routers_are_those_of_the_same_micro_batches(tmp_path, home):
    file = tmp_path / "strategies.yaml"
    file.write_text(BALANCED.replace("HOME", home))
    options = {**MOE, "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1, "train_iters": 5, "disable_bias_linear": True}
    command = toy_gpt(COMMON, options, hot_switch_strategy_file=str(file))
    hot = run_pretrain(command, 4, probe=full_parameters, before=(one_document_per_row, same_weights))
    options["expert_model_parallel_size"] = 2
    stock = stock_run("4,1,1", tell_padding, one_document_per_row, same_weights, **options)
    assert_equal_but_for_rounding(hot, stock)
    balancing = reported(hot, "load_balancing_loss")
    assert len(balancing) == 5 and all(balancing)
    assert balancing == pytest.approx(reported(stock, "load_balancing_loss"), rel=1e-4)


@pytest.mark.parametrize(
    ("strategies", "buckets", "says_so"),
    [
        # The second guest often has no data: the first one's gradients go home then.
        (["2,1,1", "1,2,1", "1,1,2"], [32, 31, 30, 0], "of gradients to guest 1,1,2"),
        # The first guest often has no data: the second one's parameters come from home then.
        (["1,2,1", "2,1,1", "1,1,2"], [32, 2, 1, 0], "of parameters from guest 2,1,1"),
    ],
    ids=["mostly shortest", "mostly longest"],
)
def test_strategies_without_data_in_a_step_change_nothing(strategies, buckets, says_so):
    options = {"train_iters": 6, "global_batch_size": 2, "optimizer": "sgd", "lr": 0.1}
    hot = hot_run(strategies, buckets, **options)
    stock = stock_run(strategies[0], **options)
    assert_equal_but_for_rounding(hot, stock)
    assert says(hot, says_so)


_tokens: list = []


def watch_tokens():
    """Note by how many tokens every step divides its gradients, and how many it meant to train."""
    from megatron_ext.hot_switch.step import SwitchingStep

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
    """Note the state of the generator of dropout where turns of guests begin and end, and around all of them."""
    import contextlib
    import hashlib

    import torch

    from megatron_ext.hot_switch.guest import Guest
    from megatron_ext.hot_switch.step import SwitchingStep

    training, run_guests = Guest.training, SwitchingStep._run_guests

    def state():
        return hashlib.sha256(torch.cuda.get_rng_state().numpy().tobytes()).hexdigest()

    @contextlib.contextmanager
    def watched(self, *args):
        with training(self, *args):
            begin = state()
            yield
            _states.append((self.strategy.label, begin, state()))

    def guests(self, *args):
        before = state()
        run_guests(self, *args)
        _states.append(("home", before, state()))

    Guest.training, SwitchingStep._run_guests = watched, guests


def seen_states(model, optimizer, args):
    """What was noted."""
    return _states


def test_every_turn_of_a_guest_drops_out_by_numbers_of_its_own_and_none_of_homes():
    options = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "train_iters": 3}
    command = arguments(["2,1,1", "1,2,1", "1,1,2"], [32, 16, 8, 0], **options)
    for rank in run_pretrain(command, 2, before=watch_generators, probe=seen_states):
        guests = [(begin, end) for label, begin, end in rank.probe if label != "home"]
        assert len(guests) == len({begin for begin, _ in guests}) == 6
        assert all(begin != end for begin, end in guests)
        around = [(before, after) for label, before, after in rank.probe if label == "home"]
        assert len(around) == len({before for before, _ in around}) == 3
        assert all(before == after for before, after in around)


def test_bf16_stays_as_near_to_stock_as_rounding_allows():
    options = {**PRECISIONS["bf16-distopt-overlap"], "lr": 2e-3, "train_iters": 10}
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    stock = stock_run("2,1,1", **options)
    assert losses(hot) == pytest.approx(losses(stock), abs=0.02)
    assert losses(stock)[-1] < losses(stock)[0]  # it learns meanwhile


def test_fp16_skips_the_steps_that_stock_skips_and_stays_as_near_as_rounding_allows():
    # The scale is too large for the first steps, and grows again later.
    options = {"fp16": True, "initial_loss_scale": 2.0**16, "hysteresis": 1, "loss_scale_window": 4, "train_iters": 15}
    hot = hot_run(["2,1,1", "1,2,1"], [32, 12, 0], **options)
    stock = stock_run("2,1,1", **options, accumulate_allreduce_grads_in_fp32=True)
    scales = loss_scales(hot)
    assert scales == loss_scales(stock)
    assert scales[0] > min(scales) < scales[-1]
    assert losses(hot) == pytest.approx(losses(stock), abs=1e-3)
    # Steps that are skipped have no norm.
    norms = [(ours, theirs) for ours, theirs in zip(hot[0].grad_norms, stock[0].grad_norms, strict=True) if theirs]
    assert 5 < len(norms) < 15
    assert [ours for ours, _ in norms] == pytest.approx([theirs for _, theirs in norms], rel=0.01)


def loss_scales(ranks):
    """The scale of the loss in every step."""
    return [float(scale) for scale in re.findall(r"loss scale: (\S+)", ranks[-1].stdout)]


def forbid_attention_over_rows():
    """Let Megatron's own attention fail."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = None


def forbid_attention_by_document():
    """Let ours fail."""
    from megatron_ext.hot_switch import attention

    attention.attend_within_documents = None


def test_attention_over_whole_rows_changes_nothing():
    options = {**LLAMA, "train_iters": 5, "recompute_granularity": "selective", "eval_iters": 0}
    runs = [
        run_pretrain(
            arguments(["1,2,1", "2,1,1"], [32, 12, 0], hot_switch_attention=attention, **options),
            2,
            before=forbid_the_other,
            probe=full_parameters,
        )
        for attention, forbid_the_other in (
            ("documents", forbid_attention_over_rows),
            ("rows", forbid_attention_by_document),
        )
    ]
    assert_equal_but_for_rounding(*runs)


def test_validation_without_masks_has_the_losses_of_validation_with_them():
    options = {"train_iters": 2, "eval_interval": 1, "eval_iters": 2, "lr": 0.1}
    found = []
    for flag in ({}, {"no_create_attention_mask_in_dataloader": True}):
        ranks = hot_run(["1,1,1"], [32, 0], **options, **flag)
        values = re.findall(r"validation loss at .*lm loss value: (\S+)", ranks[0].stdout)
        found.append([float(value) for value in values])
    assert len(found[0]) >= 2 and len(set(found[0])) > 1
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("skips", [None, True], ids=["training", "no training"])
def test_validation_with_parts_of_rows_has_the_losses_of_validation_with_whole_ones(tmp_path, skips):
    file = tmp_path / "strategies.yaml"
    options = {"train_iters": 2, "eval_interval": 1, "eval_iters": 2, "lr": 0.01, "skip_train": skips}
    found = []
    for home in ("{dp: 2, tp: 1, pp: 1}", "{dp: 1, tp: 1, pp: 1, cp: 2}"):
        file.write_text(f"bucket_sizes: [32, 0]\nstrategies: [{home}]\n")
        ranks = run_pretrain(toy_gpt(COMMON, options, hot_switch_strategy_file=str(file)), 2, before=same_weights)
        values = re.findall(r"validation loss at .*lm loss value: (\S+)", ranks[-1].stdout)
        found.append([float(value) for value in values])
    assert len(found[0]) >= (1 if skips else 2)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert "--no-create-attention-mask-in-dataloader is set" in ranks[0].stdout


def test_options_that_change_no_result():
    run = (["2,1,1", "1,2,1"], [32, 12, 0])
    # Without clipping: buckets change the order in which the norm is summed up.
    common = {"train_iters": 4, "use_distributed_optimizer": True, "bf16": True, "clip_grad": 0.0}
    plain = hot_run(*run, **common)
    with_options = hot_run(
        *run,
        **common,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_num_buckets=3,
        ddp_pad_buckets_for_high_nccl_busbw=True,
        no_align_grad_reduce=True,
        no_align_param_gather=True,
        disable_gloo_process_groups=True,
        exit_signal_handler=True,
        exit_duration_in_mins=60,
    )
    assert losses(plain) == losses(with_options)
    assert [rank.parameters for rank in plain] == [rank.parameters for rank in with_options]
    assert len(set(losses(plain))) == 4


_rounds: list = []


def watch_rounds():
    """Note at every module of a guest's first forward pass how many of its rounds have arrived, of how many."""
    from megatron_ext.hot_switch.arriving import Arriving

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
def test_layers_are_used_while_later_ones_are_on_their_way(profiles):
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

    from megatron_ext.hot_switch.guest import Guest
    from megatron_ext.hot_switch.placed_model import PlacedModel

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
    ids=["gradients go on", "parameters go on"],
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
