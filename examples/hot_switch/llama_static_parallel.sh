#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a LLaMA with one parallel strategy, on the documents that llama_hot_switch.sh reads and in rows packed like there.
#
#   llama_static_parallel.sh [--dry-run | --print] [3b|7b|13b|32b] [CONTEXT] [GLOBAL_BATCH] [MICRO_BATCH] [HOSTFILE] [STEPS] [EPOCHS] [DATA_PATH]
#
# Defaults: 3b 4096 512 1 examples/hot_switch/hostfile 100 1, mock data. MICRO_BATCH counts packed rows of CONTEXT tokens. The
# strategy is the one that configs/hot_switch_strategies.txt gives the longest documents, because it fits; for 8 GPUs try also
#   ALL_PARALLEL_STRATEGY="8,1,1" (DP, TP, PP)   "4,2,1"   "4,1,2"   "2,4,1"   "2,2,2"   "1,4,2"   "1,8,1"
#
# The hostfile, the other environment variables, --dry-run, --print and BACKEND=cpu are those of llama_hot_switch.sh.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/llama.sh
source "$ROOT/examples/hot_switch/lib/llama.sh"

read_one_strategy_arguments "$@"
choose_one_strategy
check_batch
check_data

# shellcheck source=examples/hot_switch/lib/llama_arguments.sh
source "$ROOT/examples/hot_switch/lib/llama_arguments.sh"
start_llama
