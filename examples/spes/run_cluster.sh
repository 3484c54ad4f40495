#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts one peer of a SPES run per node, and on the node of rank 0 the server as well.
#
#   run_cluster.sh [--resume] [--dry-run]       on every node, as schedulers do that set RANK and MASTER_ADDR
#   srun --ntasks-per-node=1 run_cluster.sh     under SLURM, which says both
#   run_cluster.sh --hosts HOSTFILE [--resume]  on one machine: starts the others over ssh, in the same folder. A line of the
#                                               file is HOST slots=GPUS, and the first host has the server
#
# The server ends when the last peer has left, or when its own node's peer is done and no other peer has called for WAIT_SECONDS,
# which must be longer than the time between their rounds.
#
# --dry-run prints the command line of a node's peer and what it would do (docs/explain.md), and starts nothing; RANK is 0 and
# MASTER_ADDR localhost where they are not set.
#
# Environment: all variables of run_parameter_server.sh and run_single_node.sh (see their --help), except that here
#   RANK           is which peer this node is: 0, 1, ...
#   MASTER_ADDR    is where rank 0 is
#   NPROC_PER_NODE is their GPUS_PER_NODE
#   PEER_MASTER_PORT is their MASTER_PORT, which launchers of a whole cluster set
#   PORT           is the server's port (50051)
#   BIND           is 0.0.0.0
#   TOKEN_FILE, TLS_CA, TLS_CERT, TLS_KEY  are needed, files on every node; or
#   INSECURE       is 1, in a network where nobody else is (0)
#   MERGE_ALPHA_START, MERGE_DECAY_STEPS  are 0.05 and 20000, as in the paper's 9B run
#   STATE_DIR      is the folder of the server's state (outputs/spes/server)
#   RUN            is the name of the run (spes)
#   TOTAL_PEERS    is the number of peers (4)
#   WAIT_SECONDS   is how long the server waits for peers that do not call (86400)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# What of the environment run_single_node.sh takes as it is.
OF_A_NODE=(BACKEND DATA_ARGS_PATH DATA_PATH EXTRA_ARGS MERGE_FILE MODE MODEL OUTPUT SPES_CONFIG SYNC_STEPS TOKENIZER
    TRAIN_ITERS VERBOSE VOCAB_FILE VOCAB_SIZE)

DRY_RUN=0
for word in "$@"; do
    [[ $word != --dry-run ]] || DRY_RUN=1
done

if [[ ${1:-} == --hosts ]]; then
    # shellcheck source=scripts/lib/hosts.sh
    source "$ROOT/scripts/lib/hosts.sh"
    (($# >= 2)) || launch_error "--hosts needs a file with a line 'HOST slots=GPUS' for every peer"
    read_hostfile "$2"
    shift 2
    ((${#HOSTS[@]} == ${TOTAL_PEERS:-4})) ||
        launch_error "there are ${#HOSTS[@]} hosts for ${TOTAL_PEERS:-4} peers; set TOTAL_PEERS, and num_peers in SPES_CONFIG"
    if [[ $DRY_RUN == 1 ]]; then
        # The first peer, which stands for all.
        exec env RANK=0 MASTER_ADDR="${HOSTS[0]#*@}" NPROC_PER_NODE="$SLOTS" "$ROOT/examples/spes/run_cluster.sh" "$@"
    fi
    # shellcheck disable=SC2034 # over_ssh reads it
    PASSED_ON=("${OF_A_NODE[@]}" BIND INSECURE MERGE_ALPHA_START MERGE_DECAY_STEPS MERGE_INTERVAL PEER_MASTER_PORT PORT RUN
        STATE_DIR TLS_CA TLS_CERT TLS_KEY TOKEN_FILE TOTAL_PEERS WAIT_SECONDS)
    pids=()
    for rank in "${!HOSTS[@]}"; do
        JOB=(env RANK="$rank" MASTER_ADDR="${HOSTS[0]#*@}" NPROC_PER_NODE="$SLOTS" "$ROOT/examples/spes/run_cluster.sh" "$@")
        is_this_machine "${HOSTS[rank]}" || over_ssh "${HOSTS[rank]}" "${JOB[@]}"
        "${JOB[@]}" </dev/null &
        pids+=($!)
    done
    trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
    status=0
    for rank in "${!HOSTS[@]}"; do
        # One that fails can be started again, and the others continue meanwhile.
        wait "${pids[rank]}" || {
            status=$?
            say "the peer on ${HOSTS[rank]} has ended with exit code $status"
        }
    done
    exit "$status"
fi
if [[ -z ${RANK:-} && -n ${SLURM_PROCID:-} ]]; then
    ((${SLURM_LOCALID:-0} == 0)) || launch_error "a peer needs a node of its own; use srun --ntasks-per-node=1"
    RANK="$SLURM_PROCID"
    if [[ -z ${MASTER_ADDR:-} ]]; then
        mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        MASTER_ADDR="${NODES[0]:-}"
    fi
fi
if [[ $DRY_RUN == 1 ]]; then
    RANK="${RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-localhost}"
fi
is_number "${RANK:-}" || launch_error "RANK is ${RANK:-not set}; set it to 0, 1, ..., another number on every node"
[[ -n ${MASTER_ADDR:-} ]] || launch_error "MASTER_ADDR is not set; set it to the address of the node of RANK 0"
if [[ ${MODE:-} == centralized ]]; then
    launch_error "MODE=centralized needs no server: one node trains alone (run_single_node.sh 0)"
fi
PORT="${PORT:-50051}"
check_counts PORT WAIT_SECONDS PEER_MASTER_PORT NPROC_PER_NODE
if [[ -n ${NPROC_PER_NODE:-} ]]; then
    export GPUS_PER_NODE="$NPROC_PER_NODE"
fi

SERVER_SECURITY=() PEER_SECURITY=() STATUS_SECURITY=()
if [[ -n ${TLS_CA:-} ]]; then
    for name in TOKEN_FILE TLS_CERT TLS_KEY; do
        [[ -n ${!name:-} ]] || launch_error "$name is not set; TLS_CA needs TOKEN_FILE, TLS_CERT and TLS_KEY too"
    done
    SERVER_SECURITY=(--token-file "$TOKEN_FILE" --tls-cert "$TLS_CERT" --tls-key "$TLS_KEY")
    STATUS_SECURITY=(--token-file "$TOKEN_FILE" --tls-ca "$TLS_CA")
    PEER_SECURITY=(TOKEN_FILE="$TOKEN_FILE" TLS_CA="$TLS_CA")
elif [[ ${INSECURE:-0} == 1 ]]; then
    SERVER_SECURITY=(--insecure) STATUS_SECURITY=(--insecure) PEER_SECURITY=(INSECURE=1)
else
    launch_error "set TOKEN_FILE, TLS_CA, TLS_CERT and TLS_KEY, or INSECURE=1 where nobody else reaches the server"
fi

find_python
# What a launcher of the whole cluster has set is not for the launcher of this node's job.
node=(env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT -u BIND -u TOKEN_FILE -u TLS_CA -u INSECURE
    SERVER_ADDR="$MASTER_ADDR:$PORT" "${PEER_SECURITY[@]}" ${PEER_MASTER_PORT:+MASTER_PORT="$PEER_MASTER_PORT"}
    "$ROOT/examples/spes/run_single_node.sh" "$RANK" "$@")
if ((RANK > 0 || DRY_RUN)); then
    exec "${node[@]}"
fi
# A server without this node's peer would wait for the others, and for this one's next start.
"${node[@]}" --check

export STATE_DIR="${STATE_DIR:-$ROOT/outputs/spes/server}"
# The server writes down its address when it listens; a former one's file says nothing of this one.
listening() { stat -c %y "$STATE_DIR/address" 2>/dev/null || true; }
before="$(listening)"
# How often others have joined, as its journal says.
joined() {
    grep -s '"event": *"joined"' "$STATE_DIR/runs/${RUN:-spes}/journal.jsonl" | grep -vc "\"peer\": *\"node$RANK\"" || true
}
joined_before="$(joined)"
env PORT="$PORT" BIND="${BIND:-0.0.0.0}" MERGE_ALPHA_START="${MERGE_ALPHA_START:-0.05}" \
    MERGE_DECAY_STEPS="${MERGE_DECAY_STEPS:-20000}" "$ROOT/examples/spes/run_parameter_server.sh" "${SERVER_SECURITY[@]}" &
server=$! peer=
# shellcheck disable=SC2086 # no word where the peer is not there
trap 'kill $server $peer 2>/dev/null || true; wait' EXIT
# Without a server of its own the peer might meet whoever listens at that port.
while [[ "$(listening)" == "$before" ]]; do
    kill -0 "$server" 2>/dev/null || launch_error "the server has not started (see above), so this node's peer is not either"
    sleep 0.2
done
status=0
# Not in the foreground: this shell would end without it.
"${node[@]}" &
peer=$!
wait "$peer" || status=$?
peer=

# The others may have steps to go: the server ends when they have left, which two answers have to say.
if ((status != 0)); then
    again=(env "SERVER_ADDR=$MASTER_ADDR:$PORT" "${PEER_SECURITY[@]}" ${PEER_MASTER_PORT:+MASTER_PORT="$PEER_MASTER_PORT"})
    for name in GPUS_PER_NODE "${OF_A_NODE[@]}"; do
        [[ -z ${!name:-} ]] || again+=("$name=${!name}")
    done
    again+=("$ROOT/examples/spes/run_single_node.sh" "$RANK")
    [[ ! -f "${OUTPUT:-$ROOT/outputs/spes}/node$RANK/latest_checkpointed_iteration.txt" ]] || again+=(--resume)
    say "this peer has failed (exit code $status); the server continues for the others, until they have come and left." \
        "To start it again on this node:$(printf ' %q' "${again[@]}")"
fi
# The other peers of the server: how many, for how many seconds none has called, and their names.
COUNT='import json, sys, time
own, begin = sys.argv[1], float(sys.argv[2])
peers = [peer for run in json.load(sys.stdin)["runs"] for peer in run["peers"] if peer["peer"] != own]
heard = max([begin, *(peer["last_seen"] or 0 for peer in peers)])
print(len(peers), max(0, int(time.time() - heard)), ", ".join(peer["peer"] for peer in peers))'
begin="$(date +%s)"
answered="$begin"
others() {
    local answer
    answer="$(python -m megatron_ext.cli.main server status --json --server "$MASTER_ADDR:$PORT" "${STATUS_SECURITY[@]}")" &&
        python -c "$COUNT" "$1" "$begin" <<<"$answer"
}
# While a peer that has failed is gone, the others may not have come yet.
has_met() { ((status == 0 || ${TOTAL_PEERS:-4} == 1 || $(joined) > joined_before)); }
alone=0 awaited=""
while ((alone < 2)) && kill -0 "$server" 2>/dev/null; do
    # A server too busy to answer has not said that nobody is there.
    now="$(date +%s)"
    read -r left silent names <<<"$(others "$( ((status == 0)) || echo "node$RANK")" || echo unknown $((now - answered)))"
    [[ $left == unknown ]] || answered="$now"
    if [[ $left == 0 ]] && has_met; then
        alone=$((alone + 1))
    else
        alone=0
    fi
    if [[ $left != unknown && ${names:-} != "$awaited" ]]; then
        awaited="${names:-}"
        [[ -z $awaited ]] || say "the server continues until $awaited are done; \`server evict\` removes one that will not come back"
    fi
    if ((silent >= ${WAIT_SECONDS:-86400})); then
        say "no call from ${awaited:-any other peer} for $silent s (WAIT_SECONDS): ending the server, whose state stays in" \
            "$STATE_DIR"
        exit $((status ? status : 1))
    fi
    ((alone == 2)) || sleep 2
done
if ((alone < 2)); then
    ended=0
    wait "$server" || ended=$?
    server=
    # One that is drained ends by itself.
    ((ended == 0)) || say "the server has ended with exit code $ended; its state stays in $STATE_DIR: start this script again with" \
        "--resume, here and where a peer has ended"
    exit $((status ? status : ended))
fi
exit "$status"
