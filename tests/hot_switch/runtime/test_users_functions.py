# SPDX-License-Identifier: Apache-2.0
"""A user's own script with hot switching: what works as it is, and what is refused in one sentence."""

import re
from pathlib import Path

import pytest

from tests.hot_switch.runs import arguments, assert_equal_except_for_rounding, full_parameters, hot_run
from tests.support.distributed import REPOSITORY
from tests.support.every_run import one_of_each
from tests.support.pretrain import run_failing_pretrain, run_pretrain

RUN = (["1,1,2", "2,1,1"], [32, 12, 0])

# A script like Megatron's; what follows replaces parts of it.
SCRIPT = f"""
import sys
from functools import partial

sys.path.insert(0, {str(REPOSITORY / "examples")!r})
import pretrain_gpt as gpt
from megatron.core.utils import get_attr_wrapped_model

"""
PLAIN_FUNCTIONS = """
def forward_step(samples, model):
    batch = gpt.next_batch(samples, get_attr_wrapped_model(model, "vp_stage"))
    losses = model(batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])

def loss_function(mask, losses):
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.int(), {"lm loss": gpt.torch.stack([total.detach(), count])}

gpt.forward_step = forward_step
"""
DOUBLE_WEIGHTS = """
loss_function = gpt.masked_loss

def masked_loss(mask, losses):
    total, count, report = loss_function(mask, losses)
    return 2 * total, 2 * int(count), report

gpt.masked_loss = masked_loss
"""
READS_AHEAD = """
next_batch = gpt.next_batch
ahead = {}

class Ahead:
    def __init__(self, samples):
        self.samples = samples
        self.next = next(samples)

    def __next__(self):
        found, self.next = self.next, next(self.samples, None)
        return found

def batch_before(samples, vp_stage):
    if samples is None:
        return next_batch(samples, vp_stage)
    if id(samples) not in ahead:
        ahead.clear()
        ahead[id(samples)] = Ahead(samples)
    return next_batch(ahead[id(samples)], vp_stage)

gpt.next_batch = batch_before
"""
ASKS_FOR_MORE = """
class Asking:
    def __init__(self, samples):
        self.samples = samples

    def __next__(self):
        found = next(self.samples)
        try:
            return {**found, "attention_mask": found["attention_mask"]}
        except KeyError:
            return found

next_batch = gpt.next_batch
gpt.next_batch = lambda samples, vp_stage: next_batch(samples and Asking(samples), vp_stage)
"""
TWO_PASSES = """
def forward_step(samples, model):
    batch = gpt.next_batch(samples, get_attr_wrapped_model(model, "vp_stage"))
    model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(gpt.masked_loss, batch["loss_mask"])

gpt.forward_step = forward_step
"""
SINGLE_NUMBERS = """
loss_function = gpt.masked_loss

def masked_loss(mask, losses):
    total, count, report = loss_function(mask, losses)
    return total, count, {"lm loss": total.detach() / count}

gpt.masked_loss = masked_loss
"""
MEANS = """
loss_function = gpt.masked_loss

def masked_loss(mask, losses):
    total, count, report = loss_function(mask, losses)
    return total / count, report

gpt.masked_loss = masked_loss
"""
OTHER_NAMES = """
loss_function = gpt.masked_loss

def masked_loss(mask, losses):
    total, count, report = loss_function(mask, losses)
    if gpt.get_args().curr_iteration == 1:
        report["another loss"] = report["lm loss"]
    return total, count, report

gpt.masked_loss = masked_loss
"""
NAMES_BY_LENGTH = """
loss_function = gpt.masked_loss

def masked_loss(mask, losses):
    total, count, report = loss_function(mask, losses)
    if COMPARED(mask.numel(), 12):
        report["another loss"] = report["lm loss"]
    return total, count, report

gpt.masked_loss = masked_loss
"""
NAMES_OF_SHORT_ROWS = "from operator import le as COMPARED" + NAMES_BY_LENGTH
NAMES_OF_LONG_ROWS = "from operator import gt as COMPARED" + NAMES_BY_LENGTH
MASK_OF_ONES = """
loss_function = gpt.masked_loss
gpt.masked_loss = lambda mask, losses: loss_function(gpt.torch.ones_like(mask), losses)
"""
OWN_TOKENS = """
next_batch = gpt.next_batch

def random_batch(samples, vp_stage):
    args = gpt.get_args()
    shape = args.micro_batch_size, args.seq_length
    tokens = gpt.torch.randint(64, shape)
    positions = gpt.torch.arange(args.seq_length).expand(shape)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": gpt.torch.ones(shape), "position_ids": positions}
    return {**batch, "attention_mask": None}

gpt.next_batch = random_batch
"""
TWO_BATCHES = """
next_batch = gpt.next_batch

def every_second_batch(samples, vp_stage):
    next_batch(samples, vp_stage)
    return next_batch(samples, vp_stage)

gpt.next_batch = every_second_batch
"""
PAST_THE_END = """
next_batch = gpt.next_batch
made = {}

def pairs(samples):
    while True:
        yield next(samples), next(samples)

def second_of_pair(samples, vp_stage):
    if samples is not None and id(samples) not in made:
        made.clear()
        made[id(samples)] = pairs(samples)
    return next_batch(samples and iter([next(made[id(samples)])[1]]), vp_stage)

gpt.next_batch = second_of_pair
"""
EVERY_SECOND = """
class EverySecond:
    last = None

    def __init__(self, samples):
        self.samples = samples

    def __next__(self):
        found = [next(self.samples, None), next(self.samples, None)]
        EverySecond.last = found[1] or found[0] or EverySecond.last
        return EverySecond.last

next_batch = gpt.next_batch
gpt.next_batch = lambda samples, vp_stage: next_batch(samples and EverySecond(samples), vp_stage)
"""
OTHER_KEYS = """
next_batch = gpt.next_batch

def batch_of_text(samples, vp_stage):
    return {"tokens": next(samples)["text"]}

gpt.next_batch = batch_of_text
"""
HALF_ROWS = """
next_batch = gpt.next_batch

def half_batch(samples, vp_stage):
    batch = next_batch(samples, vp_stage)
    return {key: value[:, : value.shape[1] // 2] if value is not None else None for key, value in batch.items()}

gpt.next_batch = half_batch
"""
MODEL_HOOKS = """
make_config = gpt.argument_utils.gpt_config_from_args

def gpt_config_from_args(args):
    config = make_config(args)
    config.pre_wrap_hooks.append(lambda chunks: chunks)
    return config

gpt.argument_utils.gpt_config_from_args = gpt_config_from_args
"""
OWN_ATTENTION = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention

make_config = gpt.argument_utils.gpt_config_from_args

class Capped(DotProductAttention):
    def forward(self, query, *rest, **options):
        return super().forward(gpt.torch.tanh(query), *rest, **options)

def layers(config, vp_stage=None):
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Capped
    return spec

def gpt_config_from_args(args):
    config = make_config(args)
    config.transformer_layer_spec = layers
    return config

gpt.argument_utils.gpt_config_from_args = gpt_config_from_args
"""
OPTIONS_OF_THE_CONFIG = """
make_config = gpt.argument_utils.gpt_config_from_args

def gpt_config_from_args(args):
    config = make_config(args)
    config.transformer.window_size = (3, 3)
    return config

gpt.argument_utils.gpt_config_from_args = gpt_config_from_args
"""
MEANS_BY_THE_CONFIG = OPTIONS_OF_THE_CONFIG.replace("window_size = (3, 3)", "calculate_per_token_loss = False")
EXPERTS_OF_THE_CONFIG = """
make_config = gpt.argument_utils.gpt_config_from_args

def gpt_config_from_args(args):
    config = make_config(args)
    experts = config.transformer
    experts.num_moe_experts, experts.moe_ffn_hidden_size, experts.moe_router_topk = 4, 32, 2
    experts.add_bias_linear, experts.moe_router_load_balancing_type = False, "sinkhorn"
    return config

gpt.argument_utils.gpt_config_from_args = gpt_config_from_args
"""
MODEL_PROVIDER = """
train = gpt.pretrain

def pretrain(container, *rest, **options):
    mine, container.model = container.model, None

    def model_provider(pre_process=True, post_process=True, vp_stage=None, **others):
        from megatron.training.models.gpt import GPTModelBuilder
        groups = others.get("pg_collection")
        return GPTModelBuilder(mine).build_model(groups, pre_process, post_process, vp_stage)

    return train(container, *rest, model_provider=model_provider, **options)

gpt.pretrain = pretrain
"""

CONFIG_OF_ARGUMENTS = """
next_batch = gpt.next_batch

def after_a_look_at_the_config(samples, vp_stage):
    config = gpt.core_transformer_config_from_args(gpt.get_args())
    assert config.tensor_model_parallel_size == gpt.mpu.get_tensor_model_parallel_world_size()
    return next_batch(samples, vp_stage)

gpt.next_batch = after_a_look_at_the_config
"""


def written(folder: Path, changes: str) -> str:
    """Return the path of a user's script."""
    script = folder / "pretrain_mine.py"
    script.write_text(f"{SCRIPT}{changes}\ngpt.main()\n")
    return str(script)


@pytest.fixture(scope="module")
def plain_run():
    return hot_run(*RUN, train_iters=5)


@pytest.mark.parametrize(
    "changes",
    [PLAIN_FUNCTIONS, DOUBLE_WEIGHTS, READS_AHEAD, ASKS_FOR_MORE],
    ids=["ignore documents", "weigh tokens", "read ahead", "ask for more than there is"],
)
def test_functions_that_are_another_way_to_say_the_same_train_the_same(tmp_path, plain_run, changes):
    mine = run_pretrain(arguments(*RUN, train_iters=5), 2, script=written(tmp_path, changes), probe=full_parameters)
    assert_equal_except_for_rounding(mine, plain_run)


def test_a_config_made_of_the_arguments_is_of_the_strategy_whose_turn_it_is(tmp_path):
    command = arguments(["1,1,2", "1,2,1"], [32, 12, 0], train_iters=2)
    ranks = run_pretrain(command, 2, script=written(tmp_path, CONFIG_OF_ARGUMENTS))
    assert len(ranks[-1].losses) == 2


MISTAKES = [
    (TWO_PASSES, r"the forward step ran \[\d+\] forward passes .* for \d+ micro-batches; .* exactly once for each"),
    (SINGLE_NUMBERS, "the loss function reports a single number as 'lm loss'; report its sum and the number"),
    (MEANS, "the loss function returns 2 values; let it return the sum of the losses, the number of tokens"),
    (OTHER_NAMES, r"the loss function reports \['another loss', 'lm loss'\]; it reported \['lm loss'\] before"),
    (NAMES_OF_SHORT_ROWS, r"function reports \['lm loss'\]; it reported \['another loss', 'lm loss'\] before"),
    (NAMES_OF_LONG_ROWS, r"function reports \['another loss', 'lm loss'\]; it reported \['lm loss'\] before"),
    (MASK_OF_ONES, r"the loss function counts all \d+ positions of a micro-batch, and some of them are padding"),
    (OWN_TOKENS, "the forward step took 0 of the \\d+ micro-batches of a turn from its iterator; let get_batch"),
    (TWO_BATCHES, "the forward step takes more than the \\d+ micro-batches of a turn from its iterator; let get"),
    (PAST_THE_END, "the forward step takes more than the \\d+ micro-batches of a turn from its iterator; let get"),
    (EVERY_SECOND, "the forward step takes more than the \\d+ micro-batches of a turn from its iterator; let get"),
    (OTHER_KEYS, "get_batch reads 'text', but micro-batches have tokens, labels, loss_mask, position_ids; let it"),
    (HALF_ROWS, r"the model is given 1 rows of \d+ positions, and the documents of the micro-batch are 1 rows of"),
    (MODEL_HOOKS, "the model's config has pre_wrap_hooks or post_wrap_hooks, .* build the model without them"),
    (OWN_ATTENTION, "the model's core attention is Capped, which does not keep the documents of a row apart;"),
    (OPTIONS_OF_THE_CONFIG, "other than N,0, as the model's config says, is not supported with hot switching: "),
    (MEANS_BY_THE_CONFIG, "the model's config says calculate_per_token_loss=False; leave it as --calculate-per-"),
    (EXPERTS_OF_THE_CONFIG, "sinkhorn, as the model's config says, is not supported with hot switching: "),
    (MODEL_PROVIDER, "the model was built by a model_provider; give pretrain.. the model's config"),
]


@pytest.mark.parametrize(
    ("changes", "said"),
    one_of_each(MISTAKES, {0, 3, 5, 6, 8, 12, 14, 16, 18}),
    ids=[
        "two forward passes",
        "single numbers",
        "means",
        "other names",
        "names of short rows",
        "names of long rows",
        "a mask of ones",
        "tokens of its own",
        "two batches at once",
        "a generator past the end",
        "every second batch",
        "other keys",
        "half rows",
        "model hooks",
        "attention",
        "options of the config",
        "means by the config",
        "experts of the config",
        "model provider",
    ],
)
def test_what_cannot_work_ends_the_run_with_one_error_and_no_traceback(tmp_path, changes, said):
    exits = run_failing_pretrain(arguments(*RUN, train_iters=3), 2, script=written(tmp_path, changes))
    assert all(rank.exit_code != 0 for rank in exits)
    printed = "".join(rank.stderr for rank in exits)
    assert len(re.findall(said, printed)) == 1, printed
    assert "Traceback" not in printed
