# SPDX-License-Identifier: Apache-2.0
"""What a run that continues from a saved state must have in common with the one that saved, and is told."""

import pytest

from megatron_ext.errors import UserError
from megatron_ext.local_sgd.config import LocalSGDConfig
from megatron_ext.local_sgd.streaming import StreamingConfig
from megatron_ext.local_sgd.taken_over import changes, method_of, refuse_other_method, tuning_of
from megatron_ext.outer.config import OuterOptimizerConfig
from megatron_ext.outer.reducer_config import GTAConfig

ADAM = "torch.optim.Adam"


def outer(**arguments):
    return OuterOptimizerConfig(outer_optim_class=ADAM, outer_optim_kwargs=arguments)


def method(config):
    return method_of(LocalSGDConfig(), config, GTAConfig(), StreamingConfig())


def test_arguments_of_a_class_stay_except_for_the_learning_rate():
    saved = method(outer(lr=0.01))
    refuse_other_method(saved, method(outer(lr=0.5)), "there", "repair it")
    with pytest.raises(UserError, match=r"there: --outer-optim-kwargs \(beside lr\) was not given .*'amsgrad'"):
        refuse_other_method(saved, method(outer(lr=0.01, amsgrad=True)), "there", "repair it")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        pytest.param(
            OuterOptimizerConfig(),
            outer(lr=0.01),
            "--outer-optimizer was 'sgd' in the run that saved it, and is not given now; --outer-optim-class was not "
            "given in the run that saved it, and is 'torch.optim.adam.Adam' now; repair it",
            id="class in place of sgd",
        ),
        pytest.param(
            outer(lr=0.01),
            OuterOptimizerConfig(outer_optim_class="torch.optim.AdamW", outer_optim_kwargs={"lr": 0.01}),
            "--outer-optim-class was 'torch.optim.adam.Adam' in the run that saved it, and is "
            "'torch.optim.adamw.AdamW' now; repair it",
            id="another class with the same states",
        ),
    ],
)
def test_another_class_is_named_beside_what_was_in_its_place(before, now, said):
    with pytest.raises(UserError) as refused:
        refuse_other_method(method(before), method(now), "there", "repair it")
    assert str(refused.value) == f"there: {said}"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"density": 0.25}, "--local-sgd-pseudo-grad-density was 0.5 in the run that saved it, and is 0.25 now"),
        ({"consensus_method": "count"}, "--local-sgd-pseudo-grad-consensus was 'sum' .* and is 'count' now"),
        ({"sparsification_method": "magnitude"}, "-sparsification was 'random' .* and is 'magnitude' now"),
    ],
)
def test_another_way_to_reduce_is_refused(fields, said):
    def reducing(**changed):
        gta = {"reducer": "gta", "consensus_method": "sum", "sparsification_method": "random", "density": 0.5}
        return method_of(LocalSGDConfig(), OuterOptimizerConfig(), GTAConfig(**{**gta, **changed}), StreamingConfig())

    refuse_other_method(reducing(), reducing(), "there", "repair it")
    with pytest.raises(UserError, match=said):
        refuse_other_method(reducing(), reducing(**fields), "there", "repair it")


def test_what_only_one_side_has_is_a_change_too():
    by_name = tuning_of(LocalSGDConfig(), OuterOptimizerConfig(outer_optimizer=ADAM, outer_optimizer_lr=0.5))
    by_class = tuning_of(LocalSGDConfig(), outer(lr=0.01))
    assert changes(by_name, by_name) == {}
    assert changes(by_class, by_name) == {
        "--outer-optimizer-lr": ("not given", 0.5),
        "--outer-optim-kwargs": ({"lr": 0.01}, "not given"),
    }


def test_a_schedule_in_place_of_a_rate_is_a_change():
    fixed, changing = (
        tuning_of(LocalSGDConfig(), OuterOptimizerConfig(outer_optimizer_lr_schedule=text)) for text in (None, "1:0.5")
    )
    assert changes(fixed, changing) == {
        "--outer-optimizer-lr": (0.7, "not given"),
        "--outer-optimizer-lr-schedule": ("not given", "1:0.5"),
    }


def test_another_detector_or_none_is_a_change():
    fields = {"use_local_sgd": True, "local_sgd_workers": 4}
    without = LocalSGDConfig(**fields)
    first = LocalSGDConfig(**fields, skip_anomaly=True)
    second = LocalSGDConfig(**fields, skip_anomaly=True, ewma_threshold=5.0)
    of = [tuning_of(config, OuterOptimizerConfig()) for config in (without, first, second)]
    assert changes(of[1], of[2]) == {"--local-sgd-ewma-threshold": (3.0, 5.0)}
    assert changes(of[1], of[0])["--local-sgd-skip-anomaly"] == (True, "not given")


def test_another_penalty_or_none_is_a_change():
    fields = {"use_local_sgd": True, "local_sgd_workers": 4, "codec": "topk"}
    without = LocalSGDConfig(**fields, codec_density=0.5)
    first = LocalSGDConfig(**fields, clip_pseudo_grad=10.0, pseudo_gradnorm_reduce=True)
    second = LocalSGDConfig(**fields, clip_pseudo_grad=1.0, pseudo_gradnorm_reduce=True, weight_scale_free=True)
    of = [tuning_of(config, OuterOptimizerConfig()) for config in (without, first, second)]
    assert changes(of[1], of[2]) == {
        "--local-sgd-clip-pseudo-grad": (10.0, 1.0),
        "--local-sgd-weight-scale-free": (False, True),
    }
    gone = changes(of[1], of[0])
    assert gone["--local-sgd-pseudo-gradnorm-reduce"] == (True, "not given")
    assert gone["--local-sgd-codec-density"] == (1 / 32, 0.5)
