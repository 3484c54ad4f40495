# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the scripts use the arrays
#
# Sourced with BACKEND=cpu: the same arrays for a model that trains on a laptop in seconds, with as many strategies as the
# real run, on 4 processes of this machine.

HOSTS=(localhost) SLOTS=4
CONTEXT=128

TOY_STRATEGIES=("1,2,2" "4,1,1" "2,2,1" "2,1,2" "1,4,1" "1,1,4") # home, then from the shortest bucket on
((${#STRATEGIES[@]} <= ${#TOY_STRATEGIES[@]})) ||
    launch_error "${#STRATEGIES[@]} strategies are more than the ${#TOY_STRATEGIES[@]} of a toy run (BACKEND=cpu); give fewer"
STRATEGIES=("${TOY_STRATEGIES[@]:0:${#STRATEGIES[@]}}")
BUCKETS=()
for ((number = 0; number < ${#STRATEGIES[@]}; number++)); do
    BUCKETS+=($((CONTEXT >> number)))
done
BUCKETS+=(0)

GPT_MODEL_ARGS=(
    --num-layers 4
    --hidden-size 64
    --ffn-hidden-size 160
    --num-attention-heads 4
    --vocab-size 512
    --seq-length "$CONTEXT"
    --max-position-embeddings "$CONTEXT"
    --position-embedding-type rope
    --swiglu
    --disable-bias-linear
    --normalization LayerNorm
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
    --transformer-impl local
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 16
    --train-iters $((STEPS * EPOCHS))
    --lr 1e-3
    --lr-decay-style constant
    --weight-decay 0.01
    --clip-grad 1.0
    --bf16
    --recompute-granularity selective
)

HOT_SWITCH_ARGS=(
    --hot-switch-strategies "${STRATEGIES[@]}"
    --hot-switch-bucket-sizes "${BUCKETS[@]}"
    --hot-switch-gpus-per-node "$SLOTS"
)
