#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# HotSPa's experiment on CommonCrawl with a LLaMA of 7B on 8 GPUs: contexts of 4K to 32K, both combinations of strategies.
#
#   commoncrawl_7b_8gpus.sh [--dry-run] [HOSTFILE] [DATA_PATH]
#
# Defaults: examples/hot_switch/hostfile, outputs/data/commoncrawl (the prefix of a .bin/.idx pair). Environment: STEPS (100), OUTPUT
# (outputs/hot_switch, the folder of the logs), and that of llama_hot_switch.sh except for the strategies, which are in
# configs/hot_switch_strategies.txt; --dry-run prints them in the command lines. BACKEND=cpu starts it at toy size.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd -P)"
# shellcheck source=examples/hot_switch/lib/experiments.sh
source "$ROOT/examples/hot_switch/lib/experiments.sh"

run_paper_case commoncrawl 7b 8 "$@"
