# SPDX-License-Identifier: Apache-2.0
"""The training loop keeps what features have given it, whatever the release does about it."""

from types import SimpleNamespace

from tests.support.distributed import run_ranks


def functions_in_the_loop() -> list[str]:
    """Return the names of the functions that a loop like 0.18's finds in, before and after training."""
    from megatron.training import global_vars, training

    from megatron_ext.seams.training import loop_patches

    def hook() -> None: ...

    def train(model, optimizer, opt_param_scheduler, config):
        config.finalize_model_grads_func = training.finalize_model_grads
        return config.finalize_model_grads_func.__name__

    (patch,) = (patch for patch in loop_patches() if patch.name == "training/train")
    global_vars._GLOBAL_ARGS = SimpleNamespace(save=None)
    train = patch.wrap(train)
    return [
        *(train([], None, None, SimpleNamespace(finalize_model_grads_func=given)) for given in (hook, None)),
        training.finalize_model_grads.__name__,
    ]


def test_a_hook_of_gradients_stays_where_the_loop_puts_its_own_function():
    (found,) = run_ranks(functions_in_the_loop, 1)
    assert found == ["hook", "finalize_model_grads", "finalize_model_grads"]
