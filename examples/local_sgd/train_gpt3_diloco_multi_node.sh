#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a GPT-3 of 6.7B parameters with DiLoCo on several nodes: each node is one worker with TP 8, so that between
# two rounds nothing leaves a node. Start it on every node, with the same arguments:
#
#   NUM_NODES=4 NODE_RANK=0 MASTER_ADDR=node0 \
#       train_gpt3_diloco_multi_node.sh [--dry-run] [CHECKPOINT_PATH [TENSORBOARD_LOGS_PATH [VOCAB_FILE MERGE_FILE] DATA_PATH]]
#
# Defaults: folders in outputs/gpt3_diloco_multi_node_BACKEND, mock data. The paths must be on storage that all nodes share.
# Arguments come before variables. --dry-run prints
# the command line and what it would do (docs/explain.md), and starts nothing.
#
# Environment:
#   BACKEND        gpu, or cpu for the same job at toy size on this machine, by default with 4 processes (gpu)
#   METHOD         diloco, or edit, which adds EDiT's penalty (diloco)
#   TRAIN_ITERS    steps of training (140000; at toy size 20)
#   GPUS_PER_NODE  processes of a node (8)
#   NUM_NODES      nodes, each of them a worker (4; at toy size 1)
#   NODE_RANK      which of them this is (0)
#   MASTER_ADDR, MASTER_PORT  the node with NODE_RANK=0, and a port of it (localhost at toy size or on one node, 29500)
#   VERBOSE        1 to see all that Megatron and torch print, which otherwise is in CHECKPOINT_PATH.node0.log, ... (0)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help data "$@"
read_dry_run "$@"
set -- ${REST[@]+"${REST[@]}"}

BACKEND="${BACKEND:-gpu}"
if [[ $BACKEND == cpu ]]; then
    GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
    NUM_NODES="${NUM_NODES:-1}"
else
    GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
    NUM_NODES="${NUM_NODES:-4}"
fi
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"

check_counts NUM_NODES MASTER_PORT
if ! is_number "$NODE_RANK" || ((NODE_RANK >= NUM_NODES)); then
    launch_error "NODE_RANK is '$NODE_RANK'; give a whole number from 0 to $((NUM_NODES - 1)) (NUM_NODES is $NUM_NODES)"
fi
if ((NUM_NODES > 1)) && [[ $DRY_RUN == 0 && $BACKEND == gpu && $MASTER_ADDR == localhost ]]; then
    launch_error "MASTER_ADDR is not set: give the address of the node with NODE_RANK=0"
fi
read_paths "gpt3_diloco_multi_node_$BACKEND" "$@"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

# The global batch is that of all workers together: each takes 1/NUM_NODES of it.
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 1024
    --train-iters "${TRAIN_ITERS:-140000}"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 1.2e-4
    --lr-decay-style cosine
    --min-lr 1.2e-5
    --lr-warmup-fraction .01
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

LOCAL_SGD_ARGS=(
    --use-local-sgd
    --local-sgd-workers "$NUM_NODES"
    --local-sgd-sync-interval 500
    --local-sgd-warmup-steps 2000
    --outer-optimizer sgd
    --outer-optimizer-lr 0.7
    --outer-optimizer-momentum 0.9
    --outer-optimizer-nesterov
)

set_data_args

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

choose_backend
choose_method
read_extra_args
find_python

# Megatron's own script needs no change: torchrun ... -m megatron_ext /path/to/Megatron-LM/pretrain_gpt.py ...
start_job "$CHECKPOINT_PATH.node$NODE_RANK.log" torchrun "${DISTRIBUTED_ARGS[@]}" "$ROOT/examples/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOCAL_SGD_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    ${EXTRA[@]+"${EXTRA[@]}"}
