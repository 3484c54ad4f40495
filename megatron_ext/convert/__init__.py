# SPDX-License-Identifier: Apache-2.0
"""Models between Megatron's checkpoints (and the sync service's snapshots) and Hugging Face's folders.

`families/` says what a ``config.json`` means in Megatron's words, `hf_names.py` which rows are which; `from_hf.py` and
`to_hf.py` move them, one tensor in memory at a time.
"""

from megatron_ext.convert.from_hf import Converted, from_hf
from megatron_ext.convert.to_hf import Exported, ToHf, to_hf

__all__ = ["Converted", "Exported", "ToHf", "from_hf", "to_hf"]
