# SPDX-License-Identifier: Apache-2.0
"""Configuration of the reducer: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

from dataclasses import dataclass
from typing import Literal

from megatron_ext.config_options import FromArgs, flag, flag_of, on_off
from megatron_ext.outer.penalty_config import PenaltyConfig

__all__ = ["GTAConfig"]


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

    @property
    def is_mean(self) -> bool:
        """Whether the common pseudo-gradient is the weighted mean."""
        return self.reducer in (None, "linear") and self.normalize

    def problems(self, penalty: PenaltyConfig) -> list[str]:
        """Return the problems of the values, one sentence each.

        Args:
            penalty: decides over the weights that a reducer is given.
        """
        found = []
        names = {name: flag_of(entry) for name, entry in self.__dataclass_fields__.items()}
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
        if self.int8_mask and self.consensus_method is None:
            found.append(f"{names['int8_mask']} needs {names['consensus_method']}; add it or drop the option")
        if not self.normalize and self.reducer is None:
            found.append(f"--no-local-sgd-pseudo-grad-normalize needs {names['reducer']}; add it or drop the option")
        elif not self.normalize and not penalty.pseudo_gradnorm_reduce:
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
