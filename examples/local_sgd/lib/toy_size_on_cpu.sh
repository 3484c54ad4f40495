# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the launch scripts use the arrays
#
# Sourced by the launch scripts with BACKEND=cpu: the same arrays for a model that trains on a laptop in seconds.
# Every two processes are one worker with TP 2; with two processes each is a worker of its own, because a lone
# worker would have nobody to meet. The local SGD settings are the same except for the shorter interval.

TRAIN_ITERS="${TRAIN_ITERS:-20}"
PROCESSES=$((GPUS_PER_NODE * NUM_NODES))
TENSOR_PARALLEL=$((PROCESSES >= 4 ? 2 : 1))
case "$PROCESSES" in
    2 | 4 | 8 | 16) ;;
    *)
        launch_error "BACKEND=cpu trains with 2, 4, 8 or 16 processes, not $PROCESSES; set GPUS_PER_NODE and NUM_NODES"
        ;;
esac

GPT_MODEL_ARGS=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 64
    --max-position-embeddings 64
)

TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters "$TRAIN_ITERS"
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
    --lr 1.0e-3
    --lr-decay-style constant
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

LOCAL_SGD_ARGS=(
    --use-local-sgd
    --local-sgd-workers $((PROCESSES / TENSOR_PARALLEL))
    --local-sgd-sync-interval 4
    --local-sgd-warmup-steps $((TRAIN_ITERS > 4 ? 4 : 1)) # then the saves below are at sync points
    --outer-optimizer sgd
    --outer-optimizer-lr 0.7
    --outer-optimizer-momentum 0.9
    --outer-optimizer-nesterov
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --save-interval 8
    --eval-interval 8
    --eval-iters 2
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)
