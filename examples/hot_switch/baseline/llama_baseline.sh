#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a LLaMA with stock Megatron: its own loader, one parallel strategy, none of hot switching.
#
#   llama_baseline.sh [--dry-run | --print] [3b|7b|13b|32b] [CONTEXT] [GLOBAL_BATCH] [MICRO_BATCH] [HOSTFILE] [STEPS] [EPOCHS] [DATA_PATH]
#
# Defaults: 3b 4096 512 1 examples/hot_switch/hostfile 100 1, mock data. GLOBAL_BATCH and MICRO_BATCH count rows of CONTEXT tokens.
# The strategy is the one that llama_static_parallel.sh takes.
#
# Environment, besides that of llama_hot_switch.sh (ALL_PARALLEL_STRATEGY is one strategy here):
#   ROWS           packed: Megatron's rows out of one stream of documents; padded: a document, or a piece of a long one, in each
#                  row, filled up with ends of documents that count nothing (packed)
#   OUTPUT         folder of the logs, and of the padded corpus, which `megatron-ext data pad` makes once (outputs/hot_switch)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/llama.sh
source "$ROOT/examples/hot_switch/lib/llama.sh"

read_one_strategy_arguments "$@"
ROWS="${ROWS:-packed}"
OUTPUT="${OUTPUT:-$ROOT/outputs/hot_switch}"

[[ $ROWS == packed || $ROWS == padded ]] || launch_error "ROWS=$ROWS is unknown; use packed or padded"
[[ $ROWS == packed || -n $DATA_PATH ]] || launch_error "ROWS=padded fills up the documents of a corpus; give DATA_PATH"
choose_one_strategy
check_batch
check_data

# shellcheck source=examples/hot_switch/lib/llama_arguments.sh
source "$ROOT/examples/hot_switch/lib/llama_arguments.sh"
# shellcheck source=examples/hot_switch/lib/baseline.sh
source "$ROOT/examples/hot_switch/lib/baseline.sh"
take_stock_arguments
start_llama
