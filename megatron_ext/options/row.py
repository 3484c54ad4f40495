# SPDX-License-Identifier: Apache-2.0
"""What a row of the table of options is, and short words to write rows with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

from megatron_ext.options.common_verdicts import AS_A_PEER
from megatron_ext.options.verdict import CIRCUMSTANCES, FEATURES, OptionVerdict
from megatron_ext.phrases import as_field

__all__ = ["Asked", "Row", "differs", "everywhere", "given", "is_set", "row", "says"]

Asked = Callable[[Any], bool]
"""Whether Megatron's arguments, parsed and not yet validated, ask for an option."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of Megatron's options, or some of its values, and all that this package says about it."""

    option: str
    """What sentences call it: the flag, with the value that is meant where the row speaks of one."""

    flags: tuple[str, ...]
    """The flags of Megatron's parser that the row speaks of."""

    asked: Asked
    """Whether a run asks for it."""

    verdicts: Mapping[str, OptionVerdict]
    """By each of `FEATURES`."""

    peers_share: str | Callable[[Any], object] = ""
    """What all peers of a run must have in common: the name of an argument, or a function of all of them; empty where
    each peer has its own. The mean of two models that compute different things is neither, equal shapes or not."""

    in_config: tuple[str, ...] = ()
    """Where a script can ask for it without an argument, or for what `asked` looks at: attributes of the
    `GPTModelConfig` that it may build, whose last parts are the arguments' names, as `transformer.fp8`."""

    variables: tuple[str, ...] = ()
    """The arguments without which a release does not have the option: its parser makes none of them, and nobody can
    ask. Empty where every release has it."""

    cpu_default: Mapping[str, Any] = field(default_factory=dict)
    """The value that the CPU backend gives it when the command line does not say, by its name in the namespace; empty
    where Megatron's own default is good there."""

    def __post_init__(self) -> None:
        """Check that the row is whole.

        Raises:
            ValueError: it lacks a verdict or a flag, or has one for an unknown feature or circumstance.
        """
        if set(self.verdicts) != set(FEATURES):
            odd = sorted(set(self.verdicts) ^ set(FEATURES))
            raise ValueError(f"table of options, {self.option}: one verdict for each feature, not for {odd}")
        for feature, verdict in self.verdicts.items():
            unknown = sorted(set(verdict.exceptions) - CIRCUMSTANCES.get(feature, frozenset()))
            if unknown:
                raise ValueError(f"table of options, {self.option}: {feature} has no circumstance {unknown}")
        if not self.flags or not all(flag.startswith("--") for flag in self.flags):
            raise ValueError(f"table of options, {self.option}: the flags {self.flags} are none of a command line")

    def refuses_by_itself(self, verdict: OptionVerdict) -> bool:
        """Return whether the CPU backend and a feature refuse the option for one reason: the option's, not theirs.

        Args:
            verdict: of the backend or a feature.
        """
        said = (verdict.status, verdict.reason, verdict.way_out)
        by = [name for name, each in self.verdicts.items() if (each.status, each.reason, each.way_out) == said]
        return verdict.status == "refused" and "cpu" in by and len(by) > 1

    def is_in(self, args: Any) -> bool:
        """Return whether the release whose parser made `args` has the option."""
        return all(hasattr(args, name) for name in self.variables)


class Verdicts(TypedDict):
    """Arguments of `row` that are verdicts."""

    cpu: OptionVerdict
    local_sgd: OptionVerdict
    hot_switch: OptionVerdict
    sync_service: OptionVerdict


def everywhere(verdict: OptionVerdict) -> Verdicts:
    """Return the verdicts of a row that has the same one for the CPU backend and all features."""
    return Verdicts(cpu=verdict, local_sgd=verdict, hot_switch=verdict, sync_service=verdict)


def row(
    option: str,
    asked: Asked | None = None,
    *,
    cpu: OptionVerdict,
    local_sgd: OptionVerdict,
    hot_switch: OptionVerdict,
    sync_service: OptionVerdict,
    spes: OptionVerdict = AS_A_PEER,
    flags: tuple[str, ...] | None = None,
    peers_share: str | Callable[[Any], object] = "",
    in_config: tuple[str, ...] = (),
    variables: tuple[str, ...] = (),
    cpu_default: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    """Return a row.

    Args:
        option: what sentences call it: the flag, perhaps with a value.
        asked: whether the arguments ask for it; by default whether the flag's own variable is set.
        cpu: verdict of the CPU backend.
        local_sgd: verdict of local SGD.
        hot_switch: verdict of hot switching.
        sync_service: verdict of a job that meets others at the sync service.
        spes: verdict of such a job that trains a part of the experts.
        flags: the flags that the row speaks of; by default the first word of `option`.
        peers_share: the argument that all peers of a run must have in common, or a function of all arguments.
        in_config: attributes of the `GPTModelConfig` by which a script can ask for it too.
        variables: the arguments that only those releases have which have the option; where `asked` is left out, the
            flag's own variable is one.
        cpu_default: its value on CPU by its name in the namespace, where Megatron's own default is not good there.
    """
    flag = option.split()[0]
    own = as_field(flag)
    return Row(
        option=option,
        flags=flags or (flag,),
        asked=asked or is_set(own),
        variables=variables if asked else (own,),
        peers_share=peers_share,
        in_config=in_config,
        cpu_default=cpu_default,
        verdicts=MappingProxyType(
            {
                "cpu": cpu,
                "local-sgd": local_sgd,
                "hot-switch": hot_switch,
                "sync-service": sync_service,
                "spes": spes,
            }
        ),
    )


def is_set(name: str) -> Asked:
    """Return whether the variable `name` is set to anything but its empty value."""
    return lambda args: bool(getattr(args, name))


def given(name: str) -> Asked:
    """Return whether the variable `name` has a value."""
    return lambda args: getattr(args, name) is not None


def differs(name: str, *values: Any) -> Asked:
    """Return whether the variable `name` has none of `values`."""
    return lambda args: getattr(args, name) not in values


def says(name: str, *values: Any) -> Asked:
    """Return whether the variable `name` has one of `values`."""
    return lambda args: getattr(args, name) in values
