#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts the server at which SPES peers meet, on this machine. Started again with the same STATE_DIR, it resumes.
#
#   run_parameter_server.sh [FURTHER ARGUMENTS OF megatron-ext server start]
#
# Environment: TOTAL_PEERS (4), SYNC_STEPS (100), PORT (50051), MERGE_INTERVAL (500; 0 never merges), MERGE_ALPHA_START (0.01),
# MERGE_DECAY_STEPS (10000), BIND (127.0.0.1; another address needs --token-file, --tls-cert and --tls-key, or --insecure),
# RUN (spes), STATE_DIR (outputs/spes/server). Which experts a peer trains, the peers say. MODE=diloco is for peers that train all:
# an outer optimizer (Nesterov), SYNC_STEPS 50, and no merging.

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

MODE="${MODE:-spes}"
case $MODE in
    spes) OUTER=() ;;
    diloco)
        SYNC_STEPS="${SYNC_STEPS:-50}" MERGE_INTERVAL="${MERGE_INTERVAL:-0}"
        OUTER=(--outer-optimizer sgd)
        ;;
    centralized) launch_error "MODE=centralized needs no server: one node trains alone (run_single_node.sh 0)" ;;
    *) launch_error "MODE=$MODE is unknown; use spes, diloco or centralized" ;;
esac
check_counts TOTAL_PEERS SYNC_STEPS MERGE_DECAY_STEPS
for name in PORT MERGE_INTERVAL; do
    if ! is_number "${!name:-0}"; then
        launch_error "$name is '${!name}'; give a whole number, 0 or more"
    fi
done
if [[ -n ${NUM_TRAIN_EXPERTS_PER_NODE:-} ]]; then
    echo "$(basename "$0"): NUM_TRAIN_EXPERTS_PER_NODE is not read here: every peer says itself which experts it trains" >&2
fi
find_python

SERVER_ARGS=(
    --dir "${STATE_DIR:-$ROOT/outputs/spes/server}"
    --bind "${BIND:-127.0.0.1}:${PORT:-50051}"
    --run "${RUN:-spes}"
    --peers "${TOTAL_PEERS:-4}"
    --sync-steps "${SYNC_STEPS:-100}"
    ${OUTER[@]+"${OUTER[@]}"}
)
if ((${MERGE_INTERVAL:-500} > 0)); then
    SERVER_ARGS+=(
        --merge-interval "${MERGE_INTERVAL:-500}"
        --merge-alpha-start "${MERGE_ALPHA_START:-0.01}"
        --merge-decay-steps "${MERGE_DECAY_STEPS:-10000}"
    )
fi

exec python -m megatron_ext.cli.main server start "${SERVER_ARGS[@]}" "$@"
