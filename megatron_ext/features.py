# SPDX-License-Identifier: Apache-2.0
"""The abilities of this package, in the order in which their handlers run."""

from __future__ import annotations

from megatron_ext.hooks import Feature

__all__ = ["all_features"]


def all_features() -> tuple[Feature, ...]:
    """Return one fresh object per ability."""
    from megatron_ext.hot_switch.feature import HotSwitchFeature
    from megatron_ext.local_sgd.feature import LocalSGDFeature
    from megatron_ext.spes.feature import SpesFeature
    from megatron_ext.sync_service.megatron.feature import SyncServiceFeature

    # Local SGD comes after hot switching: it cuts home once the guests' groups exist, and takes the gradients of all
    # strategies for the worker's own.
    return HotSwitchFeature(), LocalSGDFeature(), SpesFeature(), SyncServiceFeature()
