#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a LLaMA with hot switching: several parallel strategies in every step, by the length of the documents.
#
#   llama_hot_switch.sh [--dry-run | --print] [3b|7b|13b|32b] [CONTEXT] [GLOBAL_BATCH] [HOSTFILE] [STEPS] [EPOCHS] [DATA_PATH] [c1|c2]
#
# Defaults: 3b 32768 512 examples/hot_switch/hostfile 50 1, mock data, c1. A hostfile has lines like `10.0.0.1 slots=8`; torchrun
# is started here, and over ssh on the other hosts, in the same folder. Trains STEPS * EPOCHS steps. The strategies are those of
# configs/hot_switch_strategies.txt for the model, the number of GPUs, the context and the combination. --print prints the
# command lines, one for each host, with the vocabulary of the data where these are on this machine, and starts nothing; so does
# --dry-run, which also says what they would do (docs/explain.md).
#
# Environment:
#   BUCKET_SIZES, ALL_PARALLEL_STRATEGY  other strategies, e.g.
#                    BUCKET_SIZES="16384 8192 4096 0" ALL_PARALLEL_STRATEGY="1,4,2 8,1,1 2,2,2"
#                  trains lengths over 8192 with DP 1, TP 4, PP 2, those up to 4096 with 8,1,1, those between with 2,2,2
#   MASTER_PORT    a port of the first host (29500)
#   PYTORCH_CUDA_ALLOC_CONF  torch's, because strategies take and give up large tensors (expandable_segments:True)
#   BACKEND        gpu, or cpu for the same job at toy size with 4 processes on this machine (gpu)
#   VERBOSE        1 to see all that Megatron and torch print (0), which otherwise is in OUTPUT/logs/llama_hot_switch_3b_32768.log, ...,
#                  with several hosts in one file for each
#   OUTPUT         folder of the logs (outputs/hot_switch)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/llama.sh
source "$ROOT/examples/hot_switch/lib/llama.sh"

read_options 8 "$@"
MODEL="${POSITIONAL[0]:-3b}"
CONTEXT="${POSITIONAL[1]:-32768}"
GLOBAL_BATCH="${POSITIONAL[2]:-512}"
HOSTFILE="${POSITIONAL[3]:-$ROOT/examples/hot_switch/hostfile}"
STEPS="${POSITIONAL[4]:-50}"
EPOCHS="${POSITIONAL[5]:-1}"
DATA_PATH="${POSITIONAL[6]:-${DATA_PATH:-}}"
COMBINATION="${POSITIONAL[7]:-c1}"
MICRO_BATCH=1
BACKEND="${BACKEND:-gpu}"

require_positive CONTEXT GLOBAL_BATCH STEPS EPOCHS
[[ $COMBINATION == c[12] ]] || launch_error "COMBINATION is '$COMBINATION'; use c1 or c2"
read_model "$MODEL"
read_hostfile "$HOSTFILE"
choose_strategies "$MODEL" $((${#HOSTS[@]} * SLOTS)) "$CONTEXT" "$COMBINATION"
check_batch
check_data

# shellcheck source=examples/hot_switch/lib/llama_arguments.sh
source "$ROOT/examples/hot_switch/lib/llama_arguments.sh"
start_llama
