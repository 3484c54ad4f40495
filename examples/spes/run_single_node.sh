#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains one peer of a SPES run: a mixture of experts, of which this peer trains a fourth.
#
#   run_single_node.sh NODE_ID [--resume] [--check] [--dry-run]
#
# NODE_ID is 0 to 3, one less than the num_peers of SPES_CONFIG, and that of no peer that is alive; EXTRA_ARGS=--sync-service-take-over
# takes the place of one whose machine is gone. --resume continues from this peer's checkpoint. --check reports problems of
# arguments and environment, those of the training, too, and starts nothing. --dry-run prints the command line and what it would do
# (docs/explain.md) instead of starting it. Start examples/spes/run_parameter_server.sh first.
#
# Environment:
#   MODEL          one of the paper's: 1b (16 experts), 7b (32) or 9b (8) (9b)
#   MODE           spes, or one of its baselines: diloco (all peers train all experts; the server needs MODE=diloco, too) or
#                  centralized (this node alone, without a server) (spes)
#   BACKEND        gpu, or cpu for the same job at toy size (gpu)
#   SPES_CONFIG    the peers and experts (configs/spes_peer.yaml)
#   SERVER_ADDR    HOST:PORT of the server (as in SPES_CONFIG)
#   SYNC_STEPS     steps between two rounds (as in SPES_CONFIG; 50 with MODE=diloco)
#   TOKEN_FILE, TLS_CA  what a server beyond this machine asks for; or
#   INSECURE       1 where nobody else reaches it (0)
#   GPUS_PER_NODE  processes of this peer (8; at toy size 1)
#   TRAIN_ITERS    steps of training (as released: 50000, 500000, 200000; at toy size 200)
#   OUTPUT         folder of the checkpoints, in node0, node1, ... (outputs/spes)
#   VERBOSE        1 to see all that Megatron and torch print, which otherwise is in OUTPUT/node0.log, ... (0)
#   MASTER_PORT    where this peer's processes find each other (29500 + NODE_ID)
#   OMP_NUM_THREADS  threads of each process with BACKEND=cpu (1)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help data "$@"
NODE_ID="${1:-}"
is_number "$NODE_ID" || launch_error "takes NODE_ID [--resume] [--check] [--dry-run], and NODE_ID is ${NODE_ID:-missing}; give 0, 1, ..."
RESUME="" CHECK="" DRY_RUN=0
for option in "${@:2}"; do
    case $option in
        --resume) RESUME=1 ;;
        --check) CHECK=1 ;;
        --dry-run) DRY_RUN=1 ;;
        *) launch_error "takes NODE_ID [--resume] [--check] [--dry-run], but was given: $*" ;;
    esac
done

# shellcheck source=examples/spes/lib/models.sh
source "$ROOT/examples/spes/lib/models.sh"
MODEL="${MODEL:-9b}" MODE="${MODE:-spes}"
choose_model
check_counts TRAIN_ITERS SYNC_STEPS GPUS_PER_NODE MASTER_PORT
check_files SPES_CONFIG TOKEN_FILE TLS_CA
BACKEND="${BACKEND:-gpu}"
OUTPUT="${OUTPUT:-$ROOT/outputs/spes}"
CHECKPOINT_PATH="$OUTPUT/node$NODE_ID"
DATA_PATH="${DATA_PATH:-}"
check_data_files
read_extra_args
if [[ -z $RESUME && -f $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]]; then
    launch_error "$CHECKPOINT_PATH has a checkpoint already; add --resume to resume from it, or remove the folder"
fi
if [[ -n $RESUME && ! -f $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]]; then
    launch_error "--resume: there is no checkpoint in $CHECKPOINT_PATH; start without it"
fi

SPES_ARGS=(
    --spes-config "${SPES_CONFIG:-$ROOT/configs/spes_peer.yaml}"
    --sync-service-index "$NODE_ID"
    ${SERVER_ADDR:+--sync-service "$SERVER_ADDR"}
    ${TOKEN_FILE:+--sync-service-token-file "$TOKEN_FILE"}
    ${TLS_CA:+--sync-service-tls-ca "$TLS_CA"}
)
if [[ ${INSECURE:-0} == 1 ]]; then
    SPES_ARGS+=(--sync-service-insecure)
fi
# What is in the repository's file is for four peers and 8 experts, which the toy has, too.
if [[ -z ${SPES_CONFIG:-} && $BACKEND == gpu ]]; then
    SPES_ARGS+=(--spes-num-train-experts-per-node "$EXPERTS_PER_PEER")
elif [[ -z ${SPES_CONFIG:-} && $MODE == diloco ]]; then
    SPES_ARGS+=(--spes-num-train-experts-per-node 8)
fi
case $MODE in
    spes) SPES_ARGS+=(${SYNC_STEPS:+--sync-service-interval "$SYNC_STEPS"}) ;;
    diloco) SPES_ARGS+=(--using-dilico --sync-service-interval "${SYNC_STEPS:-$INTERVAL}") ;;
    centralized)
        ((NODE_ID == 0)) || launch_error "MODE=centralized trains on one node; NODE_ID is $NODE_ID, give 0"
        SPES_ARGS=()
        ;;
    *) launch_error "MODE=$MODE is unknown; use spes, diloco or centralized" ;;
esac

case $BACKEND in
    gpu)
        [[ $DRY_RUN == 1 ]] || nvidia-smi -L &>/dev/null ||
            launch_error "no NVIDIA GPU here (nvidia-smi finds none); BACKEND=cpu starts the same job at toy size"
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
        MODEL_ARGS=(
            "${MODEL_SIZES[@]}"
            --qk-layernorm
            --position-embedding-type rope
            --normalization RMSNorm
            --norm-epsilon 1e-6
            --swiglu
            --disable-bias-linear
            --untie-embeddings-and-output-weights
            --hidden-dropout 0
            --attention-dropout 0
            --moe-router-load-balancing-type aux_loss
            --moe-aux-loss-coeff 0.01
            --moe-z-loss-coeff 0.001
            --attention-backend auto
        )
        TRAINING_ARGS=(
            "${RUN_ARGS[@]}"
            --micro-batch-size 1
            --bf16
            --lr-decay-style cosine
            --weight-decay 0.1
            --apply-wd-to-qk-layernorm
            --adam-beta1 0.9
            --adam-beta2 0.95
            --clip-grad 1.0
            --use-distributed-optimizer
            --overlap-grad-reduce
            --overlap-param-gather
        )
        EVAL_AND_LOGGING_ARGS=(--log-interval 10 --save-interval 1000 --eval-interval 1000 --eval-iters 10)
        ;;
    cpu)
        # Peers of one process each share a few cores at toy size, and torchrun leaves threads to such a job.
        export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
        MODEL_ARGS=(
            --num-layers 2
            --hidden-size 64
            --num-attention-heads 4
            --seq-length 64
            --max-position-embeddings 64
            --position-embedding-type rope # with the rest what Hugging Face's families have, so that the toy converts
            --normalization RMSNorm
            --swiglu
            --disable-bias-linear
            --ffn-hidden-size 64
            --num-experts 8
            --moe-router-topk 2
            --moe-router-load-balancing-type aux_loss
            --moe-aux-loss-coeff 0.01
        )
        TRAINING_ARGS=(
            --micro-batch-size 2
            --global-batch-size 8
            --train-iters "${TRAIN_ITERS:-200}" # two rounds
            --lr 1e-3
            --lr-decay-style constant
            --clip-grad 1.0
        )
        EVAL_AND_LOGGING_ARGS=(--log-interval 10 --save-interval 50 --eval-interval 1000 --eval-iters 0)
        ;;
    *) launch_error "BACKEND=$BACKEND is unknown; use gpu or cpu" ;;
esac

set_data_args
if [[ $BACKEND == cpu && -n ${DATA_ARGS_PATH:-} ]]; then
    # The toy does not evaluate, and of several corpora Megatron makes no part of which no sample is asked for.
    DATA_ARGS+=(--split 100,0,0)
fi
EVAL_AND_LOGGING_ARGS+=(--save "$CHECKPOINT_PATH")
if [[ -n $RESUME ]]; then
    EVAL_AND_LOGGING_ARGS+=(--load "$CHECKPOINT_PATH")
fi
find_python
ARGUMENTS=(
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${DATA_ARGS[@]}"
    ${SPES_ARGS[@]+"${SPES_ARGS[@]}"}
    "${EVAL_AND_LOGGING_ARGS[@]}"
    ${EXTRA[@]+"${EXTRA[@]}"}
)
if [[ -n $CHECK ]]; then
    explain_command "$GPUS_PER_NODE" 1 "${ARGUMENTS[@]}" >/dev/null
fi
if [[ $DRY_RUN == 0 ]]; then
    # Peers of the same number would write the same checkpoints. The lock is held as long as anything of this start lives.
    lock_file "$CHECKPOINT_PATH.lock" "a peer with NODE_ID=$NODE_ID is running on this machine, with its checkpoints in" \
        "$CHECKPOINT_PATH; give another NODE_ID, or end that peer first"
fi

# Every peer has a launcher of its own: peers know each other through the server alone.
start_job "$CHECKPOINT_PATH.log" torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes 1 --master_addr localhost \
    --master_port "${MASTER_PORT:-$((29500 + NODE_ID))}" "$ROOT/examples/pretrain_gpt.py" "${ARGUMENTS[@]}"
