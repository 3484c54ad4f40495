#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts the server at which SPES peers meet, on this machine. Started again with the same STATE_DIR, it resumes.
#
#   run_parameter_server.sh [FURTHER ARGUMENTS OF megatron-ext server start]
#
# `megatron-ext server start --help` has those. Which experts a peer trains, the peers say: NUM_TRAIN_EXPERTS_PER_NODE, which the
# official script has, is not read.
#
# Environment:
#   MODE           spes, or diloco, for peers that train all experts: an outer optimizer (Nesterov), and no merging (spes)
#   TOTAL_PEERS    peers (4)
#   SYNC_STEPS     steps between two rounds (100; with MODE=diloco 50)
#   BIND           address to listen at (127.0.0.1); another one needs --token-file, --tls-cert and --tls-key, or --insecure
#   PORT           port to listen at (50051)
#   RUN            name of the run (spes)
#   STATE_DIR      folder of the server's state (outputs/spes/server)
#   MERGE_INTERVAL, MERGE_ALPHA_START, MERGE_DECAY_STEPS
#                  experts are merged at multiples of this step (500; with MODE=diloco 0: never), with a weight (0.01) that
#                  falls to 0 at that step (10000)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
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
