# SPDX-License-Identifier: Apache-2.0
"""The features of this package and those of others, in the order in which their handlers run.

Another package adds one under the entry-point group `megatron_ext.features`; its object is a subclass of
`megatron_ext.hooks.Feature`. Those come after this package's own, in the order of their names.
"""

from __future__ import annotations

import pkgutil

from megatron_ext.errors import UserError
from megatron_ext.hooks import Feature, feature_problems
from megatron_ext.plugins import entries, load, origin_of

__all__ = ["FEATURE_GROUP", "all_features"]

FEATURE_GROUP = "megatron_ext.features"
"""Under which installed packages name their features."""

# By name, because features may import what imports this. Local SGD comes after hot switching: it cuts home once the
# guests' groups exist, and takes the gradients of all strategies for the worker's own.
_OWN = (
    "megatron_ext.hot_switch.feature:HotSwitchFeature",
    "megatron_ext.local_sgd.feature:LocalSGDFeature",
    "megatron_ext.spes.feature:SpesFeature",
    "megatron_ext.sync_service.megatron.feature:SyncServiceFeature",
)


def all_features() -> tuple[Feature, ...]:
    """Return one fresh object per feature.

    Raises:
        UserError: another package's feature cannot be loaded, is not a whole `Feature`, or has the name of another one.
    """
    own = [pkgutil.resolve_name(name)() for name in _OWN]
    origins: dict[str, str] = {feature.name: "megatron_ext" for feature in own}
    origins["cpu"] = "megatron_ext"
    others = []
    for entry in entries(FEATURE_GROUP):
        feature = load(entry, "feature", feature_problems, _made)
        if feature.name in origins:
            raise UserError(
                f"{origin_of(entry)} and {origins[feature.name]} both have a feature named {feature.name!r}; uninstall "
                "one, or rename it"
            )
        origins[feature.name] = origin_of(entry)
        others.append(feature)
    return (*own, *others)


def _made(kind: type[Feature]) -> Feature:
    return kind()
