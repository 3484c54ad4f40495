# SPDX-License-Identifier: Apache-2.0
"""Classes of tensors of which there are none."""


class QuantizedTensor:
    """Megatron asks of every parameter whether it is one."""
