# SPDX-License-Identifier: Apache-2.0
"""Training data: turns text, code, JSON lines and Parquet into Megatron's `.bin`/`.idx` corpora.

`prepare.py` holds the whole job and reads top to bottom; the other modules are its steps:

    discover.py      which files belong to the corpus
    readers.py       a file -> its documents
    encode.py        documents -> tokens, in this process or in several
    tokenizers.py    bytes, or any Hugging Face tokenizer folder
    output.py        locked, all-or-nothing output files and the JSON file beside them
    progress.py      one progress line on standard error
    split.py         which documents --split gives to training, validation and test
    stdlib_corpus.py Python's own standard library as a corpus that every machine has

Nothing here imports torch or Megatron before the first token is written.
"""
