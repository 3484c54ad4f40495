# SPDX-License-Identifier: Apache-2.0
"""Configuration of local SGD: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

import math
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config_options import flag, flag_of, one_of
from megatron_ext.outer.codecs.all_codecs import densities, density_fits, lossy_codecs, takes_density
from megatron_ext.outer.penalty_config import PenaltyConfig

__all__ = ["LocalSGDConfig"]


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(PenaltyConfig):
    """Data-parallel workers train apart and meet every few steps through an outer optimizer.

    The pseudo-gradient penalty is EDiT's (arXiv 2412.07210). A unit is a decoder layer, the embedding, the final norm
    or the output layer; norms are taken per unit over all shards of a worker.
    """

    use_local_sgd: bool = False
    """Cut the data-parallel dimension into workers that train apart and meet only in outer rounds."""

    local_sgd_workers: int | None = None
    """Number of workers W; must divide the data-parallel size. Each worker is an ordinary Megatron job of
    data-parallel size DP/W. Unless given, as many as there can be: every data-parallel rank, or expert-parallel group,
    is one. The global batch size stays the sum over all workers. With 1 it is an ordinary run, or where an outer
    optimizer is given, such as by --outer-optimizer-lr 0.7, one that makes outer steps by itself."""

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
    Megatron's own loop an iteration is then an interval, in which every worker makes steps of its own number."""

    local_sgd_sync_time: float = 600.0
    """With --local-sgd-use-async: seconds between two rounds."""

    min_total_global_steps: int = flag("--local-sgd-min-total-global-steps", 100)
    """With --local-sgd-use-async: steps of all workers together without which there is no round."""

    gradient_accumulation_steps: int = flag("--local-sgd-gradient-accumulation-steps", 1)
    """Backward passes of one step. Changes nothing: the optimizer's steps are counted, whatever was accumulated."""

    cpu_offload: bool = flag("--local-sgd-cpu-offload", False)
    """Keep anchor and outer optimizer in the host's memory, pinned, from which they visit the GPU part by part during
    a round. What a codec or eager updates keep stays on the GPU."""

    is_debug: bool = flag("--local-sgd-is-debug", False)
    """Say in the log which units were clipped, and all workers' norms where one was left out, which is said anyway."""

    codec: str | None = one_of("--local-sgd-codec", None, lossy_codecs)
    """Compress what workers send each other in a round, with error feedback: to 16, 8 or 4 bits per value, or to the
    largest values only (topk2: in 2 bits each). Takes 8 more bytes of memory per value of a rank."""

    codec_density: float = flag("--local-sgd-codec-density", 1 / 32)
    """Fraction of the values that the codecs topk and topk2 send, or another one that takes a density, in (0, 1]; topk2
    takes 1/256 or more."""

    def problems(self) -> list[str]:
        """Return the problems of the values by themselves, one sentence each."""
        if not self.use_local_sgd:
            changed = [
                flag_of(entry)
                for name, entry in self.__dataclass_fields__.items()
                if getattr(self, name) != entry.default
            ]
            return [f"{flag} has no effect without --use-local-sgd; add it or drop the option" for flag in changed]
        found = []
        if self.local_sgd_workers is None:
            found.append(
                "--use-local-sgd needs --local-sgd-workers W where strategies are switched: they are for the ranks of "
                "a worker"
            )
        elif self.local_sgd_workers < 1:
            found.append(f"--local-sgd-workers is {self.local_sgd_workers}; it must be at least 1")
        if self.local_sgd_sync_interval < 1:
            found.append(f"--local-sgd-sync-interval is {self.local_sgd_sync_interval}; it must be at least 1 step")
        if self.local_sgd_warmup_steps < 0:
            found.append(f"--local-sgd-warmup-steps is {self.local_sgd_warmup_steps}; it must be 0 or more")
        if self.local_sgd_round_log is not None and not self.local_sgd_round_log.strip():
            found.append("--local-sgd-round-log is empty; give a file, or 'none'")
        found += self.penalty_problems(self.local_sgd_workers)
        return found + self._round_problems() + self._async_problems()

    def _async_problems(self) -> list[str]:
        found = []
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
        found = self._not_allowed(
            ("codec_density", density_fits(self.codec, self.codec_density), f"it must be {densities(self.codec)}"),
            ("local_sgd_sync_time", 0 < self.local_sgd_sync_time < math.inf, "it must be a finite number above 0"),
            ("min_total_global_steps", self.min_total_global_steps >= 1, "it must be at least 1"),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps >= 1, "it must be at least 1"),
        )
        if self.codec_density != self.__dataclass_fields__["codec_density"].default and not takes_density(self.codec):
            found.append(
                f"{self._flag('codec_density')} has no effect without {self._flag('codec')} topk or topk2; add one or "
                "drop this"
            )
        return found
