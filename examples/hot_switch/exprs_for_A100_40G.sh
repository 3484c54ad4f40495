#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# HotSPa's small evaluation: a LLaMA of 3B on 8 GPUs of 40 GB, contexts of 4K to 32K, with hot switching, and with the strategy
# of the longest documents alone; then a table of their speed.
#
#   exprs_for_A100_40G.sh [--dry-run] [HOSTFILE] [DATA_PATH]
#
# Defaults: examples/hot_switch/hostfile (8 GPUs of this machine), mock data. Environment: STEPS (10), OUTPUT (outputs/hot_switch, the
# folder of the logs), and that of llama_hot_switch.sh except for the strategies, which are in configs/hot_switch_strategies.txt.
# BACKEND=cpu starts it at toy size.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/experiments.sh
source "$ROOT/examples/hot_switch/lib/experiments.sh"

begin_small_evaluation A100_40G "$@"

for context in "${CONTEXTS[@]}"; do
    # At the shortest context hot switching has one strategy too.
    if ((context > CONTEXTS[0])); then
        run_experiment "${context}_hot" llama_hot_switch.sh 3b "$context" 512 "$HOSTFILE" "$STEPS" 1 "$DATA_PATH"
    fi
    run_experiment "${context}_static" llama_static_parallel.sh 3b "$context" 512 1 "$HOSTFILE" "$STEPS" 1 "$DATA_PATH"
done
print_summary
