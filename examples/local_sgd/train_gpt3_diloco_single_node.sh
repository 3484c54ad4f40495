#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a GPT-3 of 1.3B parameters with DiLoCo on one node: two workers, each with TP 2 and DP 2.
#
#   train_gpt3_diloco_single_node.sh [--dry-run] [CHECKPOINT_PATH [TENSORBOARD_LOGS_PATH [VOCAB_FILE MERGE_FILE] DATA_PATH]]
#
# Defaults: folders in outputs/gpt3_diloco_single_node_BACKEND, mock data. Arguments come before variables. --dry-run prints
# the command line and what it would do (docs/explain.md), and starts nothing.
#
# Environment:
#   BACKEND        gpu, or cpu for the same job at toy size on this machine, by default with 4 processes (gpu)
#   METHOD         diloco, or edit, which adds EDiT's penalty (diloco)
#   TRAIN_ITERS    steps of training (100000; at toy size 20)
#   GPUS_PER_NODE  processes of a node (8)
#   MASTER_ADDR, MASTER_PORT  where the processes find each other (localhost, 29500)
#   VERBOSE        1 to see all that Megatron and torch print, which otherwise is in CHECKPOINT_PATH.log (0)

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
else
    GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
fi
NUM_NODES=1
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-29500}"

read_paths "gpt3_diloco_single_node_$BACKEND" "$@"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

# The global batch is that of all workers together: each takes half of it.
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 512
    --train-iters "${TRAIN_ITERS:-100000}"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 2.0e-4
    --lr-decay-style cosine
    --min-lr 2.0e-5
    --lr-warmup-fraction .01
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

LOCAL_SGD_ARGS=(
    --use-local-sgd
    --local-sgd-workers 2
    --local-sgd-sync-interval 100
    --local-sgd-warmup-steps 1000
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
start_job "$CHECKPOINT_PATH.log" torchrun "${DISTRIBUTED_ARGS[@]}" "$ROOT/examples/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOCAL_SGD_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    ${EXTRA[@]+"${EXTRA[@]}"}
