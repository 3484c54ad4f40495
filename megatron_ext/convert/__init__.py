# SPDX-License-Identifier: Apache-2.0
"""Models between Megatron's checkpoints (and the sync service's snapshots) and Hugging Face's folders.

`families/` says what a ``config.json`` means in Megatron's words, `hf_names.py` which rows are which; `from_hf.py` and
`to_hf.py` move them, one tensor in memory at a time, and `upcycle.py` makes mixtures of experts. Nothing is imported
here: the command line asks for one of them only when it is meant.
"""
