# SPDX-License-Identifier: Apache-2.0
"""Seam: building the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.hooks import BuilderDone, hooks
from megatron_ext.patching import Patch

__all__ = ["patches"]


def patches() -> list[Patch]:
    """Return the patches of this seam."""
    return [
        Patch(
            name="model/build",
            target="megatron.training.models.gpt:GPTModelBuilder.build_distributed_models",
            wrap=_wrap_build,
            parameters=("self", "pg_collection", "ddp_config", "wrap_with_ddp", "data_parallel_random_init"),
            serves=(BuilderDone,),
            rebind=False,
            missing_from="<0.19",
            reason="let features build more chunks in the way the model was built",
        )
    ]


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def build_distributed_models(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        again = {**given}
        # What is built again has no optimizer, for whose layer-wise kind Megatron 0.20 would scatter its gradients.
        again.pop("use_layer_wise_distributed_optimizer", None)

        def build_again(config: Any, **changes: Any) -> list[Any]:
            chunks: list[Any] = original(type(self)(config), **{**again, **changes})
            return chunks

        model = original(self, *args, **kwargs)
        hooks.fire(
            BuilderDone(
                config=self._model_config,
                ddp_config=given.get("ddp_config"),
                trains=bool(given.get("wrap_with_ddp", True)),
                model=model,
                build_again=build_again,
            ),
        )
        return model

    return build_distributed_models
