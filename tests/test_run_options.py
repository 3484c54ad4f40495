# SPDX-License-Identifier: Apache-2.0
"""Options of a run are read, and set, where the release of Megatron keeps them: its arguments, or a container."""

import ast
from argparse import Namespace
from pathlib import Path

from tests.local_sgd.runs import arguments, local_run, same_state
from tests.support.distributed import run_ranks
from tests.support.pretrain import run_pretrain

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_ext"


def with_a_container(get_config=None):
    """Let Megatron have `get_cfg`, and arguments that are not the truth any more; return both and what is read."""
    from types import SimpleNamespace

    import megatron.training
    from megatron.training import global_vars
    from megatron.training.config import CheckpointConfig, RNGConfig, TrainingConfig
    from megatron.training.config.container import PretrainConfigContainer

    from megatron_ext.run_options import run_options

    checkpoint = CheckpointConfig(save="truth", save_interval=7, load_optim=False, fully_parallel_save=False)
    parts = {"checkpoint": checkpoint, "train": TrainingConfig(train_iters=11), "rng": RNGConfig(seed=5)}
    others = dict.fromkeys(("model", "optimizer", "scheduler", "ddp", "logger"), SimpleNamespace())
    container = PretrainConfigContainer(**parts, **others)
    old = {"save": "old", "save_interval": 1, "no_load_optim": False, "ckpt_fully_parallel_save": True}
    args = global_vars._GLOBAL_ARGS = Namespace(**old, use_local_sgd=True, num_layers=2)
    megatron.training.get_cfg = get_config or (lambda: container)
    return args, container, run_options


def what_a_container_says():
    from megatron_ext.run_options import all_options
    from megatron_ext.seams.arguments import with_arguments

    args, container, run_options = with_a_container()
    options = run_options()
    found = [options.save, options.save_interval, options.no_load_optim, options.ckpt_fully_parallel_save]
    rest = [options.use_local_sgd, options.num_layers, options.train_iters, options.seed, hasattr(options, "unknown")]
    with with_arguments(save_interval=None, no_load_optim=False):
        inside = [container.checkpoint.save_interval, container.checkpoint.load_optim, args.save_interval]
    after = [container.checkpoint.save_interval, container.checkpoint.load_optim, options.save_interval]
    options.train_iters = 12
    named = all_options(options)
    named = [named["train_iters"], named["num_layers"], named["save"]]
    return found, rest, inside, after, named, [container.train.train_iters, args.train_iters]


def test_a_container_of_configs_has_the_say_and_arguments_are_the_rest():
    ((found, rest, inside, after, named, set_in_both),) = run_ranks(what_a_container_says, 1)
    assert found == ["truth", 7, True, False]
    assert rest == [True, 2, 11, 5, False]
    assert inside == [None, True, None]
    assert after == [7, False, 7]
    assert named == [12, 2, "truth"]
    assert set_in_both == [12, 12]


def what_is_said_of_another_signature():
    from megatron_ext.errors import UserError

    _, _, run_options = with_a_container(lambda section, default=None: None)
    try:
        run_options()
    except UserError as error:
        return str(error)
    return ""


def test_a_container_of_another_kind_is_an_error_of_one_line():
    (said,) = run_ranks(what_is_said_of_another_signature, 1)
    assert "megatron.training.get_cfg needs section" in said and "docs/versions.md" in said and "\n" not in said


def let_a_container_have_the_say():
    """Register the container that Megatron's loop gets, as releases do in which it is the truth."""
    import functools

    import megatron.training

    original = megatron.training.pretrain

    @functools.wraps(original)
    def pretrain(cfg_container, *args, **kwargs):
        def get_cfg():
            megatron.training.asked_for_config = True
            return cfg_container

        megatron.training.get_cfg = get_cfg
        return original(cfg_container, *args, **kwargs)

    megatron.training.pretrain = pretrain


def was_asked(model, optimizer, args):
    """Probe: whether options were read from the container."""
    import megatron.training

    return getattr(megatron.training, "asked_for_config", False)


def test_a_run_whose_options_are_in_a_container_trains_and_saves_the_same_bits(tmp_path):
    options = {"train_iters": 5, "local_sgd_sync_interval": 2, "save": str(tmp_path), "save_interval": 3}
    run = arguments("single", "fp32", workers=2, **options, exit_signal_handler=True)
    ranks = run_pretrain(run, 2, before=let_a_container_have_the_say, probe=was_asked)
    assert [rank.probe for rank in ranks] == [True, True]
    plain = local_run("single", "fp32", workers=2, **options | {"save": None})
    assert same_state(ranks, plain)
    resumed = run_pretrain(
        arguments("single", "fp32", workers=2, **options | {"save": None}, load=str(tmp_path), ckpt_step=3),
        2,
        before=let_a_container_have_the_say,
    )
    assert same_state(resumed, plain)


def test_nothing_else_in_the_package_asks_megatron_for_its_options():
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("megatron.")
        and any(alias.name in ("get_args", "get_cfg") for alias in node.names)
    }
    assert asking == {"run_options.py"}
