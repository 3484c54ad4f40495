# SPDX-License-Identifier: Apache-2.0
"""Every feature over every layout: a resume in mid-interval keeps the bits, and rounds leave workers equal.

All pairs take eleven minutes on two cores (`--exhaustive`); without it each feature meets the layouts that other
tests leave out.
"""

import pytest

from megatron_ext.outer.codecs.all_codecs import lossy_codecs
from tests.local_sgd.runs import local_run, same_state, worker_slices

# Rounds after iterations 4, 6, 8 and 10; the anchor is taken after 2.
SCHEDULE = {"train_iters": 10, "local_sgd_warmup_steps": 2, "local_sgd_sync_interval": 2}
RESUMED = 7
"""Between two rounds, with what two left behind: momentum, residuals, moments of the detector, which judges now."""

GUARDS = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_ewma_threshold": 0.1,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.1,
}
SPARSE = {
    "local_sgd_pseudo_grad_reducer": "gta",
    "local_sgd_pseudo_grad_consensus": "count",
    "local_sgd_pseudo_grad_sparsification": "random",
    "local_sgd_pseudo_grad_density": 0.5,
}
FRAGMENTS = {
    "local_sgd_sync_interval": 4,
    "local_sgd_fragments": 2,
    "local_sgd_fragment_sync_delay": 3,
    "local_sgd_fragment_update_alpha": 0.25,
    "local_sgd_evaluation": "workers",
}
APART = {"local_sgd_evaluation": "workers"}

FEATURES = {
    "penalty": GUARDS,
    "relative norms": {**GUARDS, "local_sgd_ewma_relative": True},
    "scale-free weights": {"local_sgd_pseudo_gradnorm_reduce": True, "local_sgd_weight_scale_free": True},
    "linear": {"local_sgd_pseudo_grad_reducer": "linear", **GUARDS},
    "sparse": SPARSE,
    "in forward": {"local_sgd_sync_in_forward": True, **GUARDS},
    **{f"codec {codec}": {"local_sgd_codec": codec} for codec in lossy_codecs()},
    "streaming": FRAGMENTS,
    "streaming in 4 bits": {**FRAGMENTS, **GUARDS, "local_sgd_codec": "int4"},
    "schedules": {
        "outer_optimizer_lr_schedule": "1:0.2,3:0.7,4:0.3",
        "outer_optimizer_momentum_schedule": "1:0,4:0.8",
    },
    "eager": {**APART, "local_sgd_eager_updates": True},
    "pairs": {**APART, "local_sgd_pseudo_grad_reducer": "pairwise"},
    "offload": {"local_sgd_cpu_offload": True, "outer_optimizer": "adam", "outer_optimizer_lr": 0.01},
}
LAYOUTS = {
    "dp2": ("dp2", "bf16-distopt-overlap"),
    "tp2-sp": ("tp2-sp", "bf16-distopt"),
    "pp2": ("pp2", "bf16"),
    "pp2-vpp2": ("pp2-vpp2", "bf16-distopt-overlap"),
    "moe-ep2": ("moe-ep2", "bf16-distopt"),
    "latent-tp2": ("latent-tp2", "bf16-distopt-overlap"),
}
# Pairs that run each time, and those that run with the slow tests.
ALWAYS = {("in forward", "pp2-vpp2"), ("streaming in 4 bits", "moe-ep2")}
CHOSEN = {
    *(("in forward", "dp2"), ("codec int4", "pp2"), ("codec topk", "moe-ep2")),
    *(("pairs", "pp2"), ("pairs", "moe-ep2"), ("eager", "tp2-sp"), ("eager", "pp2-vpp2"), ("sparse", "moe-ep2")),
    *(("penalty", "pp2-vpp2"), ("in forward", "latent-tp2"), ("schedules", "pp2")),
}


def marks_of(feature, layout):
    if (feature, layout) in ALWAYS:
        return ()
    return pytest.mark.slow if (feature, layout) in CHOSEN else (pytest.mark.slow, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        pytest.param(feature, layout, marks=marks_of(feature, layout))
        for feature in FEATURES
        for layout in LAYOUTS
    ],
)
def test_a_resume_keeps_the_bits_and_rounds_leave_workers_equal(tmp_path, feature, layout):
    name, precision = LAYOUTS[layout]
    options = {**SCHEDULE, **FEATURES[feature]}
    if name.startswith("pp2"):
        options["global_batch_size"] = 8
    if "distopt" in precision and options.get("local_sgd_sync_in_forward"):
        precision = "bf16-distopt-overlap"  # the only one whose parameters are gathered in the forward pass
    count = 3 if options.get("local_sgd_ewma_relative") else 2
    if count == 3:
        options["global_batch_size"] = 12
    whole = local_run(name, precision, workers=count, save=str(tmp_path), save_interval=1, **options)
    resumed = local_run(name, precision, workers=count, load=str(tmp_path), ckpt_step=RESUMED, **options)
    assert same_state(resumed, whole)
    assert [rank.losses for rank in resumed] == [rank.losses[RESUMED:] for rank in whole]
    first, second = worker_slices(whole, name, count)[:2]
    assert first[-1].losses != second[-1].losses
    assert [one.parameters for one in first] == [other.parameters for other in second]
