# SPDX-License-Identifier: Apache-2.0
"""The events that the seams raise, and the Feature that handles them.

A feature of this package is one `Feature`. The seams (`megatron_ext.seams`) know Megatron and raise events; a feature
knows its algorithm and handles them; neither imports the other. Which features a run has is decided once, when its
arguments are validated.

    class ParameterNorm(Feature):
        name = "parameter-norm"

        @on(StepEnd)
        def print_norm(self, step: StepEnd) -> None: ...

Every feature answers what `Feature` asks. What only some can answer is asked by protocols, one for each concern
(`concerns.py`): a feature has all methods of such a protocol, or none.
"""

from megatron_ext.hooks.concerns import (
    AddsLayouts,
    CutsSamples,
    CutsWorkers,
    KeepsWeights,
    LoadContext,
    RankFiles,
    RepeatsSteps,
    ReplacesSchedule,
    SaveContext,
    SavesState,
    WeighsExperts,
)
from megatron_ext.hooks.dispatch import Hooks, hooks
from megatron_ext.hooks.events import (
    BuilderDone,
    CheckpointRead,
    ChunksBuilt,
    EvaluationEnd,
    EvaluationStart,
    Event,
    GroupsBuilt,
    ModelBuilt,
    SaveEnd,
    SaveStart,
    StepEnd,
    StepStart,
    TrainEnd,
    TrainingLog,
    TrainLeft,
    TrainStart,
    WorldReady,
)
from megatron_ext.hooks.feature import Feature
from megatron_ext.hooks.handlers import on
from megatron_ext.hooks.wholeness import feature_problems

__all__ = [
    "AddsLayouts",
    "BuilderDone",
    "CheckpointRead",
    "ChunksBuilt",
    "CutsSamples",
    "CutsWorkers",
    "EvaluationEnd",
    "EvaluationStart",
    "Event",
    "Feature",
    "GroupsBuilt",
    "Hooks",
    "KeepsWeights",
    "LoadContext",
    "ModelBuilt",
    "RankFiles",
    "RepeatsSteps",
    "ReplacesSchedule",
    "SaveContext",
    "SaveEnd",
    "SaveStart",
    "SavesState",
    "StepEnd",
    "StepStart",
    "TrainEnd",
    "TrainLeft",
    "TrainStart",
    "TrainingLog",
    "WeighsExperts",
    "WorldReady",
    "feature_problems",
    "hooks",
    "on",
]
