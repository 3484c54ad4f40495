# SPDX-License-Identifier: Apache-2.0
"""What warm-up keeps of a run is let go when the next one begins."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from megatron_ext.local_sgd.feature import LocalSGDFeature
from megatron_ext.seams import gradients


def test_a_new_run_lets_go_of_the_groups_of_the_one_before() -> None:
    class Groups:
        pass

    groups: Any = Groups()
    kept = weakref.ref(groups)
    config = SimpleNamespace(finalize_model_grads_func=lambda *args, **kwargs: None)
    gradients.install_synchronous_warmup(config, groups, lambda: True)
    del groups, config
    gc.collect()
    assert kept() is not None
    LocalSGDFeature()
    gc.collect()
    assert kept() is None
