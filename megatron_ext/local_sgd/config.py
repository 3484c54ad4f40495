# SPDX-License-Identifier: Apache-2.0
"""Configuration of local SGD: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import math
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config_options import FromArgs, flag, flag_of, on_off

__all__ = ["GTAConfig", "LocalSGDConfig"]


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(FromArgs):
    """Data-parallel workers train apart and meet every few steps through an outer optimizer.

    The pseudo-gradient penalty is EDiT's (arXiv 2412.07210). A unit is a decoder layer, the embedding, the final norm
    or the output layer; norms are taken per unit over all shards of a worker.
    """

    use_local_sgd: bool = False
    """Cut the data-parallel dimension into workers that train apart and meet only in outer rounds."""

    local_sgd_workers: int | None = None
    """Number of workers W; must divide the data-parallel size. Each worker is an ordinary Megatron job of
    data-parallel size DP/W. The global batch size stays the sum over all workers."""

    local_sgd_sync_interval: int = 1
    """Interval H: inner steps between two outer rounds. DiLoCo uses some hundred; 1 synchronises at every
    step."""

    local_sgd_warmup_steps: int = 0
    """Iterations at the start of training during which gradients are synchronous over all workers. The anchor
    is taken when they end; the first outer round comes one interval later."""

    local_sgd_evaluation: Literal["synced", "workers"] = "synced"
    """What validation runs on: 'synced' = the anchor, the weights that all workers agreed on at the last
    round; 'workers' = each worker's own current weights, the reported loss being the mean over workers."""

    sync_in_forward: bool = flag("--local-sgd-sync-in-forward", False)
    """Let every layer wait for its part of a round where the next forward pass needs it, instead of all of them at the
    end of the step, so that communication overlaps with computation. Changes no bit."""

    local_sgd_round_log: str | None = None
    """File to which every outer round appends a line of JSON. By default local_sgd_rounds.jsonl in the --save
    folder, and none without --save; 'none' writes none. Shown by `megatron-ext local-sgd report`."""

    use_async: bool = flag("--local-sgd-use-async", False)
    """A-EDiT: rounds by time instead of steps, so that workers of different speed do not wait for each other. Inside
    Megatron's own loop it is refused; megatron_ext.local_sgd.plain_torch has it."""

    local_sgd_sync_time: float = 600.0
    """With --local-sgd-use-async: seconds between two rounds."""

    min_total_global_steps: int = flag("--local-sgd-min-total-global-steps", 100)
    """With --local-sgd-use-async: steps of all workers together without which there is no round."""

    use_step_weight: bool = flag("--local-sgd-use-step-weight", False)
    """With --local-sgd-use-async: weight the workers by the steps that they made since the last round."""

    step_weight_ratio: float = flag("--local-sgd-step-weight-ratio", 0.5)
    """With --local-sgd-use-step-weight and --local-sgd-pseudo-gradnorm-reduce: share of the weights by steps, the rest
    being those by norms."""

    gradient_accumulation_steps: int = flag("--local-sgd-gradient-accumulation-steps", 1)
    """Steps are counted by the optimizer's, whatever was accumulated for one: only 1 is accepted."""

    cpu_offload: bool = flag("--local-sgd-cpu-offload", False)
    """Keep anchor and outer optimizer in the host's memory, pinned, from which they visit the GPU part by part during
    a round. What a codec or eager updates keep stays on the GPU."""

    is_debug: bool = flag("--local-sgd-is-debug", False)
    """Say in the log which units were clipped, and all workers' norms where one was left out, which is said anyway."""

    codec: Literal["bf16", "fp16", "fp8", "int8", "int4", "topk"] | None = flag(
        "--local-sgd-codec", None, type=str, choices=["bf16", "fp16", "fp8", "int8", "int4", "topk"]
    )
    """Compress what workers send each other in a round, with error feedback: to 16, 8 or 4 bits per value, or to the
    largest values only. Takes 8 more bytes of memory per value of a rank."""

    codec_density: float = flag("--local-sgd-codec-density", 1 / 32)
    """Fraction of the values that the codec topk sends, in (0, 1]."""

    skip_anomaly: bool = flag("--local-sgd-skip-anomaly", False)
    """Leave workers whose pseudo-gradient is anomalously large out of a round, unit by unit, and those that are
    not finite. When all are, the unit goes back to the anchor. Without it, weights that are not finite end the run."""

    ewma_alpha: float = flag("--local-sgd-ewma-alpha", 0.02)
    """Weight of the newest norm in the anomaly detector's moving mean and variance."""

    ewma_warmup_steps: int = flag("--local-sgd-ewma-warmup-steps", 120)
    """Rounds, not steps, before the anomaly detector flags anything that is finite."""

    ewma_threshold: float = flag("--local-sgd-ewma-threshold", 3.0)
    """Standard deviations above the mean at which a norm is anomalous."""

    ewma_official_start: bool = flag("--local-sgd-ewma-official-start", False)
    """Start the moving mean and variance at zero without bias correction, as the official implementation does."""

    ewma_relative: bool = flag("--local-sgd-ewma-relative", False)
    """Let the detector follow each worker's norm divided by the median over the workers, so that norms that fall for
    all of them, as with the learning rate, hide nobody. Needs at least 3 workers."""

    ewma_relearn_rounds: int = flag("--local-sgd-ewma-relearn-rounds", 3)
    """Rounds in which a norm that most workers share is rejected, after which it is a new level, from which the
    detector starts again: no lasting rise, as of the learning rate, skips a unit in more rounds. 0: never, as in the
    official implementation."""

    pseudo_gradnorm_reduce: bool = flag("--local-sgd-pseudo-gradnorm-reduce", False)
    """Weight the workers by softmax(-norm / temperature) of their pseudo-gradients, unit by unit."""

    weight_softmax_temperature: float | None = flag("--local-sgd-weight-softmax-temperature", None, type=float)
    """Temperature of those weights, 1.0 unless given; needs --local-sgd-pseudo-gradnorm-reduce."""

    weight_scale_free: bool = flag("--local-sgd-weight-scale-free", False)
    """Divide the norms by their mean over the workers before the softmax, so that large layers do not make it
    winner-take-all."""

    clip_pseudo_grad: float | None = flag("--local-sgd-clip-pseudo-grad", None, type=float)
    """Clip the common pseudo-gradient of each unit to this norm; usually 1 or 10."""

    @property
    def has_penalty(self) -> bool:
        """Whether a round has to know all norms before it can reduce."""
        return self.skip_anomaly or self.pseudo_gradnorm_reduce or self.clip_pseudo_grad is not None

    def problems(self) -> list[str]:
        """Return what is wrong with the values by themselves, one sentence each."""
        if not self.use_local_sgd:
            changed = [
                flag_of(entry)
                for name, entry in self.__dataclass_fields__.items()
                if getattr(self, name) != entry.default
            ]
            return [f"{flag} has no effect without --use-local-sgd; add it or drop the option" for flag in changed]
        found = []
        if self.local_sgd_workers is None:
            found.append("--use-local-sgd needs --local-sgd-workers W, the number of workers")
        elif self.local_sgd_workers < 1:
            found.append(f"--local-sgd-workers is {self.local_sgd_workers}; it must be at least 1")
        if self.local_sgd_sync_interval < 1:
            found.append(f"--local-sgd-sync-interval is {self.local_sgd_sync_interval}; it must be at least 1 step")
        if self.local_sgd_warmup_steps < 0:
            found.append(f"--local-sgd-warmup-steps is {self.local_sgd_warmup_steps}; it must be 0 or more")
        if self.local_sgd_round_log is not None and not self.local_sgd_round_log.strip():
            found.append("--local-sgd-round-log is empty; give a file, or 'none'")
        return found + self._round_problems() + self._async_problems()

    def _async_problems(self) -> list[str]:
        found = []
        if self.gradient_accumulation_steps != 1:
            found.append(
                f"{self._flag('gradient_accumulation_steps')} is {self.gradient_accumulation_steps}; drop it: the "
                "optimizer's steps are counted, whatever was accumulated for one"
            )
        if not self.use_async:
            for name in ("local_sgd_sync_time", "min_total_global_steps", "use_step_weight"):
                if getattr(self, name) != self.__dataclass_fields__[name].default:
                    found.append(f"{self._flag(name)} has no effect without {self._flag('use_async')}; drop it")
        elif self.local_sgd_sync_interval != 1:
            found.append(
                f"{self._flag('use_async')} has rounds every {self._flag('local_sgd_sync_time')} seconds; drop "
                f"{self._flag('local_sgd_sync_interval')}"
            )
        ratio, unless = self.step_weight_ratio, self.__dataclass_fields__["step_weight_ratio"].default
        # Beyond its range there is a complaint already.
        if ratio != unless and 0 <= ratio <= 1 and not (self.use_step_weight and self.pseudo_gradnorm_reduce):
            found.append(
                f"{self._flag('step_weight_ratio')} has no effect without {self._flag('use_step_weight')} and "
                f"{self._flag('pseudo_gradnorm_reduce')}; drop it"
            )
        return found

    def _round_problems(self) -> list[str]:
        found = []
        for name, allowed, rule in (
            ("ewma_alpha", 0 < self.ewma_alpha < 1, "it must be above 0 and below 1"),
            ("ewma_warmup_steps", self.ewma_warmup_steps >= 2, "it must be at least 2 rounds"),
            ("ewma_relearn_rounds", self.ewma_relearn_rounds >= 0, "it must be 0 (never) or more rounds"),
            ("ewma_threshold", 0 < self.ewma_threshold < math.inf, "it must be a finite number above 0"),
            ("weight_softmax_temperature", _positive(self.weight_softmax_temperature), "it must be finite and above 0"),
            ("clip_pseudo_grad", _positive(self.clip_pseudo_grad), "it must be finite and above 0"),
            ("codec_density", 0 < self.codec_density <= 1, "it must be above 0 and at most 1"),
            ("local_sgd_sync_time", 0 < self.local_sgd_sync_time < math.inf, "it must be a finite number above 0"),
            ("min_total_global_steps", self.min_total_global_steps >= 1, "it must be at least 1"),
            ("step_weight_ratio", 0 <= self.step_weight_ratio <= 1, "it must be in 0 to 1"),
        ):
            if not allowed:
                found.append(f"{self._flag(name)} is {getattr(self, name)}; {rule}")
        for names, needed in (
            (
                (
                    "ewma_alpha",
                    "ewma_warmup_steps",
                    "ewma_threshold",
                    "ewma_official_start",
                    "ewma_relative",
                    "ewma_relearn_rounds",
                ),
                "skip_anomaly",
            ),
            (("weight_softmax_temperature", "weight_scale_free"), "pseudo_gradnorm_reduce"),
        ):
            for name in names:
                if getattr(self, name) != self.__dataclass_fields__[name].default and not getattr(self, needed):
                    found.append(f"{self._flag(name)} has no effect without {self._flag(needed)}; add it or drop this")
        if self.ewma_relative and self.local_sgd_workers == 2:
            found.append(
                f"{self._flag('ewma_relative')} needs at least 3 workers: of two that differ, neither is the measure; "
                "drop it"
            )
        if self.codec_density != self.__dataclass_fields__["codec_density"].default and self.codec != "topk":
            found.append(
                f"{self._flag('codec_density')} has no effect without {self._flag('codec')} topk; add it or drop this"
            )
        if self.is_debug and not self.skip_anomaly and self.clip_pseudo_grad is None:
            found.append(
                f"{self._flag('is_debug')} has no effect without {self._flag('skip_anomaly')} or "
                f"{self._flag('clip_pseudo_grad')}; add one or drop this"
            )
        return found

    def _flag(self, name: str) -> str:
        return flag_of(self.__dataclass_fields__[name])


@dataclass(frozen=True, kw_only=True)
class GTAConfig(FromArgs):
    """How the workers' pseudo-gradients become one (generalized task arithmetic)."""

    reducer: Literal["linear", "gta", "pairwise"] | None = flag(
        "--local-sgd-pseudo-grad-reducer", None, type=str, choices=["linear", "gta", "pairwise"]
    )
    """'linear' = the weighted mean, which is the default as well; 'gta' = generalized task arithmetic: sign
    consensus, sparsification; 'pairwise' = no common mean, but random pairs of workers with anchors of their own
    (NoLoCo)."""

    consensus_method: Literal["sum", "count"] | None = flag(
        "--local-sgd-pseudo-grad-consensus", None, type=str, choices=["sum", "count"]
    )
    """With gta: every element keeps only the workers on the majority's side, decided by the 'sum' of the
    pseudo-gradients or by the 'count' of their signs."""

    sparsification_method: Literal["magnitude", "random", "rescaled_random"] | None = flag(
        "--local-sgd-pseudo-grad-sparsification", None, type=str, choices=["magnitude", "random", "rescaled_random"]
    )
    """With gta: keep only a part of each worker's pseudo-gradient: its largest elements, tensor by tensor as far as a
    rank owns them, or random ones (divided by the density when rescaled)."""

    normalize: bool = on_off("--local-sgd-pseudo-grad-normalize", True)
    """Divide by the weights that were summed."""

    density: float = flag("--local-sgd-pseudo-grad-density", 1.0)
    """Fraction of the elements that sparsification keeps, in (0, 1]."""

    int8_mask: bool = flag("--local-sgd-pseudo-grad-int8-mask", False)
    """Compare signs as 8-bit integers, to save memory."""

    def problems(self, local_sgd: LocalSGDConfig) -> list[str]:
        """Return what is wrong with the values, one sentence each."""
        found = []
        names = {name: flag_of(entry) for name, entry in self.__dataclass_fields__.items()}
        if self.reducer == "pairwise":
            found += self._pairwise_problems(local_sgd)
        if not 0 < self.density <= 1:
            found.append(f"{names['density']} is {self.density}; it must be above 0 and at most 1")
        elif self.density != 1 and self.sparsification_method is None:
            found.append(f"{names['density']} needs {names['sparsification_method']}; add it or drop the option")
        if self.reducer != "gta":
            for name in ("consensus_method", "sparsification_method", "int8_mask"):
                if getattr(self, name):
                    found.append(f"{names[name]} needs {names['reducer']} gta; add it or drop the option")
        elif self.consensus_method and self.normalize and self.sparsification_method == "rescaled_random":
            found.append(
                f"{names['sparsification_method']} rescaled_random with {names['consensus_method']} is 1 / density too "
                "large: who was left out does not count in the weights that are divided by either; use random"
            )
        if self.sparsification_method is not None and self.density == 1:
            found.append(f"{names['sparsification_method']} keeps everything at density 1; lower {names['density']}")
        if self.int8_mask and self.consensus_method is None:
            found.append(f"{names['int8_mask']} needs {names['consensus_method']}; add it or drop the option")
        if not self.normalize and self.reducer is None:
            found.append(f"--no-local-sgd-pseudo-grad-normalize needs {names['reducer']}; add it or drop the option")
        elif not self.normalize and not local_sgd.pseudo_gradnorm_reduce:
            found.append(
                "--no-local-sgd-pseudo-grad-normalize sums the workers' pseudo-gradients, which makes every outer step "
                "W times too large; normalise, or weight the workers with --local-sgd-pseudo-gradnorm-reduce"
            )
        elif not self.normalize and self.consensus_method is None:
            found.append(
                "--no-local-sgd-pseudo-grad-normalize has no effect without "
                f"{names['consensus_method']}: weights by norms sum up to 1; drop it"
            )
        return found

    def _pairwise_problems(self, local_sgd: LocalSGDConfig) -> list[str]:
        pairs = f"{flag_of(self.__dataclass_fields__['reducer'])} pairwise"
        found = []
        if local_sgd.has_penalty:
            found.append(f"{pairs} knows the norms of two workers only; drop the options of the penalty")
        if local_sgd.codec is not None:
            found.append(f"{pairs} is not combined with --local-sgd-codec; drop one of them")
        if local_sgd.use_async:
            found.append(f"{pairs} is not combined with --local-sgd-use-async; drop one of them")
        return found


def _positive(value: float | None) -> bool:
    return value is None or 0 < value < math.inf
