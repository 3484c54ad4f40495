# SPDX-License-Identifier: Apache-2.0
"""Training data: turns text, code, JSON, Parquet, Arrow and token ids into Megatron's `.bin`/`.idx` corpora.

`prepare.py` holds the whole job and reads top to bottom; the other modules are its steps:

    discover.py      which files belong to the corpus
    content.py       what a file holds, by its first bytes and lines
    compression.py   gzip, bzip2, xz, zstd
    survey.py        all files looked at before the first is read; what is not read is told
    readers.py       a file -> its documents; json_values.py and columns.py for records and tables
    token_ids.py     files that are token ids already (.npy)
    encode.py        documents -> tokens, in this process or in several
    tokenizers.py    bytes, or any Hugging Face tokenizer folder
    output.py        locked, all-or-nothing output files and the JSON file next to them
    progress.py      one progress line on standard error
    corpus_files.py  whether a corpus is whole
    vocabulary.py    which vocabulary its ids are of: record.py (what prepare wrote), given_vocabulary.py (what the user
                     says), largest_id.py (what the files hold)
    shards/          texts to shards of token ids, as SPES writes them
    manifest.py      several corpora as one, by a list of them
    split.py         which documents --split gives to training, validation and test
    stdlib_corpus.py Python's own standard library as a corpus that every machine has

Nothing here imports torch or Megatron before the first token is written.
"""
