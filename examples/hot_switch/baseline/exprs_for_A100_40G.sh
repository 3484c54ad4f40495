#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# HotSPa's small evaluation with stock Megatron: a LLaMA of 3B on 8 GPUs of 40 GB, contexts of 4K to 32K, on packed and on padded rows;
# then a table of their speed, to hold against that of examples/hot_switch/exprs_for_A100_40G.sh.
#
#   exprs_for_A100_40G.sh [--dry-run] [HOSTFILE] [DATA_PATH]
#
# Defaults: examples/hot_switch/hostfile (8 GPUs of this machine), mock data, of which there are packed rows alone. Environment:
# STEPS (10), OUTPUT (outputs/hot_switch, the folder of the logs and of the padded corpora), and that of llama_baseline.sh and
# llama_hot_switch.sh except for the strategies, which are in configs/hot_switch_strategies.txt. BACKEND=cpu starts it at toy size.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/experiments.sh
source "$ROOT/examples/hot_switch/lib/experiments.sh"

begin_small_evaluation A100_40G_baseline "$@"

for context in "${CONTEXTS[@]}"; do
    for rows in packed padded; do
        [[ $rows == packed || -n $DATA_PATH ]] || continue
        export ROWS="$rows"
        run_experiment "${context}_$rows" baseline/llama_baseline.sh 3b "$context" 512 1 "$HOSTFILE" "$STEPS" 1 "$DATA_PATH"
    done
done
print_summary
