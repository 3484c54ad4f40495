# SPDX-License-Identifier: Apache-2.0
"""Every reader of data-parallel groups in the installed Megatron has been decided about."""

import importlib.util
import re
from pathlib import Path

from megatron_ext.seams.process_groups import WORKER_VIEW_MODULES
from megatron_ext.worker_cuts import _slices

READS = re.compile(
    r"(?:parallel_state|mpu)\.get_(?:expert_)?(?:data_parallel|tensor_and_data_parallel)_?\w*\("
)

# Modules that keep the full groups, each with the reason.
FULL_VIEW = {
    "megatron.training.training": "sample counts and data loading span all workers",
    "megatron.training.datasets.data_samplers": "samples are split over all workers",
    "megatron.training.initialize": "seeds may differ per data-parallel rank",
    "megatron.training.checkpointing": "only when no groups are passed in; the model's groups are",
    "megatron.training.distillation.logits_saver": "not used by a run with local SGD",
    "megatron.training.distillation.cached_logits_loss": "not used by a run with local SGD",
    "megatron.core.datasets.data_schedule": "hybrid context parallelism, which local SGD refuses",
    "megatron.core.pipeline_parallel.hybrid_cp_schedule": "hybrid context parallelism, which local SGD refuses",
    "megatron.core.optimizer.qk_clip": "seams.gradients has a view for it: of all workers in warm-up, else of one",
    "megatron.core.transformer.experimental_attention_variant.dsa": "refused with local SGD",
    "megatron.core.tensor_parallel.generalized_tensor_parallelism": "GTP, which local SGD refuses",
    "megatron.core.resharding.refit": "not used by training",
    "megatron.core.hyper_comm_grid": "documentation only",
}
LEFT_OUT = ("/inference/", "/rl/", "/distributed/fsdp/", "/models/mimo/", "parallel_state.py")


def megatron_root() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def test_every_reader_of_data_parallel_groups_has_a_decided_view():
    root = megatron_root()
    readers = set()
    for path in root.rglob("*.py"):
        if any(part in str(path) for part in LEFT_OUT):
            continue
        if READS.search(path.read_text(encoding="utf-8", errors="replace")):
            readers.add(".".join(path.relative_to(root.parent).with_suffix("").parts))
    decided = {module for module, _ in WORKER_VIEW_MODULES} | set(FULL_VIEW)
    assert readers - decided - {"megatron.core.distributed.torch_fully_sharded_data_parallel"} == set()


def test_slices_are_contiguous_parts_of_every_group():
    assert _slices([[0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 4, 6]], 2) == [[0, 2], [4, 6], [1, 3], [5, 7]]
