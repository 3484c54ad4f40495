# SPDX-License-Identifier: Apache-2.0
"""A release without the builder of models from a config refuses hot switching, which builds guests by it."""

import re

from tests.hot_switch.runs import arguments
from tests.support.pretrain import run_failing_pretrain


def without_the_builder() -> None:
    """Before: be the release that has no builder where features look for it."""
    import megatron.core.package_info as info
    from megatron.training.models import gpt

    info.__version__ = "0.18.2"
    del gpt.GPTModelBuilder


def test_who_asks_for_what_a_release_cannot_do_gets_one_line():
    exits = run_failing_pretrain(arguments(["1,1,1"], [32, 0]), 1, before=without_the_builder)
    said = "hot-switch: megatron-core 0.18.2 has no GPTModelBuilder.build_distributed_models, which is needed to "
    assert exits[0].exit_code != 0
    assert len(re.findall(re.escape(said), exits[0].stderr)) == 1, exits[0].stderr
    assert "Traceback" not in exits[0].stderr
