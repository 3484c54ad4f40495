# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2054 # the scripts use the arrays
#
# Megatron's arguments for the LLaMA models of HotSPa's experiments, hot and static. Sourced by the scripts once MODEL,
# CONTEXT, GLOBAL_BATCH, MICRO_BATCH, STEPS, EPOCHS, DATA_PATH, BUCKETS and STRATEGIES are known.

GPT_MODEL_ARGS=(
    "${MODEL_SIZE_ARGS[@]}"
    --seq-length "$CONTEXT"
    --max-position-embeddings "$CONTEXT"
    --position-embedding-type rope
    --swiglu
    --disable-bias-linear
    --normalization LayerNorm
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
    # It needs neither Transformer Engine nor Apex, so that nothing which they would fuse is asked for. With the former,
    # leave these out.
    --transformer-impl local
    --attention-backend unfused
    --no-rope-fusion
    --no-persist-layer-norm
    --no-gradient-accumulation-fusion
)

TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH" # documents, or pieces of CONTEXT tokens of longer ones
    --train-iters $((STEPS * EPOCHS))
    --lr 1e-5
    --lr-decay-style constant
    --weight-decay 0.01
    --clip-grad 1.0
    --bf16
)

MODEL_PARALLEL_ARGS=(
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

HOT_SWITCH_ARGS=(
    --hot-switch-strategies "${STRATEGIES[@]}"
    --hot-switch-bucket-sizes "${BUCKETS[@]}"
    --hot-switch-gpus-per-node "$SLOTS"
)

# Rows of the embedding: the model's own number, unless the data's vocabulary has another. Bytes are ids below 257.
if ((${#VOCABULARY_ARGS[@]} > 0)); then
    DATA_ARGS=("${VOCABULARY_ARGS[@]}")
else
    DATA_ARGS=(--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1)
fi
if [[ -n $DATA_PATH ]]; then
    DATA_ARGS+=(--data-path "$DATA_PATH" --split 100,0,0)
elif [[ -n $DATA_ARGS_PATH ]]; then
    DATA_ARGS+=(--data-args-path "$DATA_ARGS_PATH" --split 100,0,0)
else
    DATA_ARGS+=(--mock-data)
fi

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-interval $((STEPS * EPOCHS + 1)) # never
    --eval-iters 0
)

case $BACKEND in
    gpu) ;;
    cpu)
        # shellcheck source=examples/hot_switch/lib/toy_size_on_cpu.sh
        source "$ROOT/examples/hot_switch/lib/toy_size_on_cpu.sh"
        ;;
    *) launch_error "BACKEND=$BACKEND is unknown; use gpu or cpu" ;;
esac
