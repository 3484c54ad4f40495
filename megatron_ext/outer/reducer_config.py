# SPDX-License-Identifier: Apache-2.0
"""Configuration of the reducer: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_ext.config_options import FromArgs, flag, flag_of, on_off, one_of
from megatron_ext.errors import UserError
from megatron_ext.outer.penalty_config import PenaltyConfig
from megatron_ext.outer.places import Where, place_problems
from megatron_ext.outer.reducers.all_reducers import DEFAULT_REDUCER, REDUCERS

if TYPE_CHECKING:
    from megatron_ext.outer.reducers.reducer import Reducer

__all__ = ["GTAConfig"]


@dataclass(frozen=True, kw_only=True)
class GTAConfig(FromArgs):
    """How the workers' pseudo-gradients become one (generalized task arithmetic)."""

    reducer: str | None = one_of("--local-sgd-pseudo-grad-reducer", None, REDUCERS.names)
    """'linear' = the weighted mean, which is the default as well; 'gta' = generalized task arithmetic: sign
    consensus, sparsification; 'pairwise' = no common mean, but random pairs of workers with anchors of their own
    (NoLoCo). Packages that are installed may add others."""

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
    def reducer_name(self) -> str:
        """What the reducer in force is called."""
        return DEFAULT_REDUCER if self.reducer is None else self.reducer

    @property
    def is_mean(self) -> bool:
        """Whether the common pseudo-gradient is the weighted mean."""
        return self.build().is_mean

    @property
    def in_pairs(self) -> bool:
        """Whether workers meet in pairs, and have anchors of their own."""
        return REDUCERS.find(self.reducer_name).in_pairs

    def build(self) -> "Reducer":
        """Return the reducer.

        Raises:
            UserError: there is none of that name, or it cannot be loaded.
        """
        kind = REDUCERS.find(self.reducer_name)
        return kind(**{name: getattr(self, name) for name in kind.options})

    def problems(self, penalty: PenaltyConfig, place: Where = Where.JOB) -> list[str]:
        """Return the problems of the values, one sentence each.

        Args:
            penalty: decides over the weights that a reducer is given.
            place: where the rounds are made.
        """
        names = {name: flag_of(entry) for name, entry in self.__dataclass_fields__.items()}
        try:
            options = REDUCERS.find(self.reducer_name).options
        except UserError as error:
            return [f"{names['reducer']}: {error}"]
        found = place_problems(names["reducer"], REDUCERS, self.reducer_name, place)
        if not 0 < self.density <= 1:
            found.append(f"{names['density']} is {self.density}; it must be above 0 and at most 1")
        elif self.density != 1 and self.sparsification_method is None:
            found.append(f"{names['density']} needs {names['sparsification_method']}; add it or drop the option")
        without_effect = [
            f"{names[name]} needs {names['reducer']} {_with_option(name)}; add it or drop the option"
            for name in ("consensus_method", "sparsification_method", "int8_mask")
            if getattr(self, name) and name not in options
        ]
        if without_effect:
            found += without_effect
        elif self.consensus_method and self.normalize and self.sparsification_method == "rescaled_random":
            found.append(
                f"{names['sparsification_method']} rescaled_random with {names['consensus_method']} is 1 / density too "
                "large: who was left out does not count in the weights that are divided by either; use random"
            )
        if self.int8_mask and self.consensus_method is None:
            found.append(f"{names['int8_mask']} needs {names['consensus_method']}; add it or drop the option")
        return found if self.normalize else found + self._sum_problems(penalty, names, options)

    def _sum_problems(self, penalty: PenaltyConfig, names: dict[str, str], options: tuple[str, ...]) -> list[str]:
        """Return why weights cannot be left as they are."""
        said = "--no-local-sgd-pseudo-grad-normalize"
        if self.reducer is None:
            return [f"{said} needs {names['reducer']}; add it or drop the option"]
        if "normalize" not in options:
            return [f"{said} has no effect with {names['reducer']} {self.reducer}; drop it"]
        if not penalty.pseudo_gradnorm_reduce:
            return [
                f"{said} sums the workers' pseudo-gradients, which makes every outer step W times too large; "
                "normalise, or weight the workers with --local-sgd-pseudo-gradnorm-reduce"
            ]
        if self.consensus_method is None:
            return [f"{said} has no effect without {names['consensus_method']}: weights by norms sum up to 1; drop it"]
        return []


def _with_option(name: str) -> str:
    """Return the names of this package's reducers for which a field means something."""
    return " or ".join(own for own in REDUCERS.own_names if name in REDUCERS.find(own).options)
