# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # run_single_node.sh uses the arrays
#
# Sourced by run_single_node.sh: the sizes and schedules of the paper's released runs, and their two baselines.

# Sets MODEL_SIZES and RUN_ARGS from MODEL (1b, 7b or 9b) and MODE (spes, diloco or centralized), and EXPERTS_PER_PEER
# and INTERVAL of four peers.
choose_model() {
    local batch rate lowest warmup iterations decay=
    case $MODEL in
        1b)
            MODEL_SIZES=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048
                --num-experts 16 --moe-router-topk 2 --moe-router-pre-softmax
                --seq-length 2048 --max-position-embeddings 2048 --rotary-base 500000)
            EXPERTS=16 batch=1024 rate=5e-4 lowest=5e-5 warmup=2000 iterations=50000
            ;;
        7b)
            MODEL_SIZES=(--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 2048
                --num-experts 32 --moe-router-topk 4 --moe-router-pre-softmax
                --seq-length 2048 --max-position-embeddings 2048 --rotary-base 32000)
            EXPERTS=32 batch=1024 rate=4e-4 lowest=4e-5 warmup=2000 iterations=500000
            ;;
        9b)
            # Its embedding has Qwen3's 151,936 rows, to which the 151,665 tokens of Qwen2.5 are padded so, with TP 1 to 8. Like
            # Qwen3 it divides the weights of a token's experts by their sum, which the others do not.
            MODEL_SIZES=(--num-layers 28 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 6144
                --group-query-attention --num-query-groups 8
                --num-experts 8 --moe-router-topk 2 --seq-length 4096 --max-position-embeddings 4096 --rotary-base 1000000
                --make-vocab-size-divisible-by 18992)
            EXPERTS=8 batch=256 rate=1e-4 lowest=1e-5 warmup=1000 iterations=200000 decay=100000
            ;;
        *) launch_error "MODEL=$MODEL is unknown; use 1b, 7b or 9b" ;;
    esac
    INTERVAL=100 EXPERTS_PER_PEER=$((EXPERTS / 4))
    if [[ $MODE == diloco ]]; then
        INTERVAL=50 EXPERTS_PER_PEER=$EXPERTS
        batch=256
    fi
    RUN_ARGS=(--global-batch-size "$batch" --lr "$rate" --min-lr "$lowest" --lr-warmup-iters "$warmup"
        --train-iters "${TRAIN_ITERS:-$iterations}")
    # The learning rate of a run of another length decays over all of it.
    [[ -z $decay || -n ${TRAIN_ITERS:-} ]] || RUN_ARGS+=(--lr-decay-iters "$decay")
}
