# SPDX-License-Identifier: Apache-2.0
"""What the optimizer of a rank steps on: values in fp32, beside the weights of the model."""

from typing import Any


def main_values(model: Any, _optimizer: Any, _args: Any) -> dict[str, list[float]]:
    """Probe: the values of a rank whose optimizer has all of them, by the names of the weights."""
    return {
        name.replace("module.", ""): getattr(weight, "main_param", weight).detach().float().flatten().tolist()
        for chunk in model
        for name, weight in chunk.named_parameters()
    }
