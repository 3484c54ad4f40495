#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a training corpus of web pages or code: Parquet -> PREFIX.jsonl -> PREFIX.bin and .idx. What is there already and was
# made from the same files is not made again.
#
#   create_web_dataset.sh PREFIX PARQUET...
#
# E.g. create_web_dataset.sh outputs/data/commoncrawl refinedweb/*.parquet. Nothing is downloaded: RefinedWeb and StarCoder's
# files, which HotSPa used, are on their publishers' pages. Environment: COLUMN of the text (content), TOKENIZER, the folder of
# a Hugging Face tokenizer (bytes without), WORKERS, tokenizing processes (1).

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/llama.sh
source "$ROOT/examples/hot_switch/lib/llama.sh"

answer_help alone "$@"
read_options 10000 "$@"
((${#POSITIONAL[@]} >= 2)) || launch_error "takes PREFIX PARQUET...; see --help"
PREFIX="${POSITIONAL[0]}"
COLUMN="${COLUMN:-content}"
WORKERS="${WORKERS:-1}"
require_positive WORKERS
[[ -n $PREFIX && $PREFIX != */ && ! -d $PREFIX ]] || launch_error "PREFIX '$PREFIX' names a folder; give what files begin with"
LINES_ARGS=("${POSITIONAL[@]:1}" --output "$PREFIX.jsonl" --column "$COLUMN")
PREPARE_ARGS=(
    data prepare "$PREFIX.jsonl"
    --jsonl-key "$COLUMN"
    --output-prefix "$PREFIX"
    --workers "$WORKERS"
    --reuse
    --overwrite
    ${TOKENIZER:+--tokenizer "$TOKENIZER"}
)
if [[ $DRY_RUN == 1 ]]; then
    quoted python "$ROOT/examples/hot_switch/create_web_dataset.py" "${LINES_ARGS[@]}" && echo
    quoted python -m megatron_ext.cli.main "${PREPARE_ARGS[@]}" && echo
    exit
fi

[[ -z ${TOKENIZER:-} || -d $TOKENIZER ]] || launch_error "TOKENIZER: there is no folder $TOKENIZER; give that of a tokenizer"
find_python
{ mkdir -p "$(dirname "$PREFIX")" && : >>"$PREFIX.lock"; } 2>/dev/null ||
    launch_error "PREFIX '$PREFIX': there can be no files; give it in a folder where you may write"
exec {LOCK}>>"$PREFIX.lock"
flock --nonblock "$LOCK" || launch_error "$PREFIX is being made by another process; wait for it, or give another PREFIX"
python "$ROOT/examples/hot_switch/create_web_dataset.py" "${LINES_ARGS[@]}"
python -m megatron_ext.cli.main "${PREPARE_ARGS[@]}"
