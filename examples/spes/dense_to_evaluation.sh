#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The whole way at toy size on this machine's CPUs, in some two minutes: a dense Hugging Face model becomes a checkpoint,
# the checkpoint a mixture of experts, four SPES peers train it over a sync service, the server's snapshot becomes a Hugging
# Face model, and that is evaluated beside the dense one.
#
#   dense_to_evaluation.sh [OUTPUT]
#
# OUTPUT (outputs/spes/dense_to_evaluation) is replaced if an earlier run made it. Environment:
#   MODEL_PATH     a dense Hugging Face model with a tokenizer (a tiny one with random weights is made)
#   TRAIN_ITERS    steps of every peer (40)
#   TASKS, TASK_FILES  tasks of lm-evaluation-harness to evaluate both models on, as for eval_full.sh (none)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
refuse_options "$@"
(($# <= 1)) || launch_error "takes [OUTPUT], but $# arguments were given"
OUTPUT="${1:-$ROOT/outputs/spes/dense_to_evaluation}"
MODEL_PATH="${MODEL_PATH:-}" TASK_FILES="${TASK_FILES:-}"
make_absolute OUTPUT MODEL_PATH TASK_FILES
MARKER=.megatron-ext-dense-to-evaluation
TRAIN_ITERS="${TRAIN_ITERS:-40}"
check_counts TRAIN_ITERS
((TRAIN_ITERS % 10 == 0)) || launch_error "TRAIN_ITERS is '$TRAIN_ITERS'; give a multiple of 10, the steps between two rounds"
if [[ -n $MODEL_PATH && ! -f $MODEL_PATH/config.json ]]; then
    launch_error "MODEL_PATH '$MODEL_PATH': no config.json; give the folder of a Hugging Face model"
fi
if [[ -n $MODEL_PATH && -z $(find -L "$MODEL_PATH" -maxdepth 1 -name 'tokenizer*') ]]; then
    launch_error "MODEL_PATH '$MODEL_PATH': no tokenizer; give the folder of a model that has one"
fi
[[ -z $TASK_FILES || -d $TASK_FILES ]] || launch_error "TASK_FILES '$TASK_FILES': no such folder"
for name in MODEL_PATH TASK_FILES; do
    if [[ -n ${!name} && "$(realpath -m "${!name}")/" == "$(realpath -m "$OUTPUT")/"* ]]; then
        launch_error "$name '${!name}' is in OUTPUT, which is replaced; move it, or choose another OUTPUT"
    fi
done
if [[ -e $OUTPUT && ! -e $OUTPUT/$MARKER ]] && [[ ! -d $OUTPUT || -n $(ls -A "$OUTPUT") ]]; then
    launch_error "OUTPUT '$OUTPUT': there is something of another kind; choose another folder"
fi
find_python
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1

rm -rf "$OUTPUT"
mkdir -p "$OUTPUT/logs"
touch "$OUTPUT/$MARKER"
cd "$OUTPUT"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Runs a command whose output goes to a log, of which the end is shown when it fails.
step() {
    local name="$1"
    shift
    echo "[$name] $*" | sed "s|$ROOT/||g"
    "$@" &>"logs/$name.log" || {
        tail -n 20 "logs/$name.log" >&2
        launch_error "$name failed; its log is $OUTPUT/logs/$name.log"
    }
}
ext() { python -m megatron_ext.cli.main "$@"; }

if [[ -z $MODEL_PATH ]]; then
    MODEL_PATH="$OUTPUT/dense"
    step dense python "$ROOT/examples/spes/lib/toy_dense.py" "$MODEL_PATH"
fi
# Two packages of Python's standard library, some 50 modules, and not the documents, with which results would change.
step corpus ext data prepare --stdlib --glob '/asyncio/*.py' --glob '/email/*.py' --tokenizer "$MODEL_PATH" --output-prefix corpus
step from-hf ext convert from-hf "$MODEL_PATH" start
step upcycle ext convert upcycle start mixture --num-experts 8
mapfile -t MODEL_ARGS <mixture/megatron_flags.txt

# A free port for the server: its own choice, which its log tells.
# Not through the function, whose shell would be killed in place of the server.
python -m megatron_ext.cli.main server start --dir server --bind 127.0.0.1:0 --run toy --peers 4 --sync-steps 10 &>logs/server.log &
SERVER=$!
until ADDRESS="$(grep -om1 '127\.0\.0\.1:[1-9][0-9]*' logs/server.log)"; do
    kill -0 "$SERVER" 2>/dev/null || launch_error "the server ended; its log is $OUTPUT/logs/server.log"
    sleep 0.2
done

TRAINING_ARGS=(
    --load mixture
    --data-path corpus
    --split 90,10,0
    --seq-length 128
    --micro-batch-size 4
    --global-batch-size 8
    --train-iters "$TRAIN_ITERS"
    --lr 3e-3
    --lr-decay-style constant
    --eval-iters 0
    --eval-interval 1000
    --log-interval 10
    --transformer-impl local
    --no-gradient-accumulation-fusion
    --moe-token-dispatcher-type alltoall
)
# Starts peer $1, one process; four of them share one machine.
start_peer() {
    torchrun --standalone --nproc_per_node 1 \
        "$ROOT/examples/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
        --using-spes --spes-num-train-experts-per-node 2 --sync-service-interval 10 --sync-service "$ADDRESS" --sync-service-run toy \
        --sync-service-peer "peer$1" --sync-service-peers 4 --sync-service-index "$1" &>"logs/peer$1.log" &
    PEERS+=($!)
}
PEERS=()
echo "[train] four peers, $TRAIN_ITERS steps each, a round every 10, each with 2 of 8 experts"
for place in 0 1 2 3; do
    start_peer "$place"
done
# Not one after the other: a peer that failed would let those before it wait.
while ((${#PEERS[@]})); do
    for place in "${!PEERS[@]}"; do
        kill -0 "${PEERS[place]}" 2>/dev/null && continue
        wait "${PEERS[place]}" || {
            # What ended it: a sentence of ours where there is one, else the end of its log.
            grep -am5 'error:' "logs/peer$place.log" >&2 || tail -n 20 "logs/peer$place.log" >&2
            launch_error "peer $place failed; its log is $OUTPUT/logs/peer$place.log"
        }
        unset "PEERS[place]"
    done
    sleep 0.5
done

step to-hf ext convert to-hf server trained --hf-config mixture
EVALUATE=(--data corpus --split 90,10,0 --sequence-length 128 --device cpu ${TASKS:+--tasks "$TASKS"}
    ${TASK_FILES:+--task-files "$TASK_FILES"})
step evaluate-dense ext evaluate "$MODEL_PATH" --name dense "${EVALUATE[@]}" --output results/dense.json
step evaluate ext evaluate trained --name mixture "${EVALUATE[@]}" --baseline results/dense.json \
    --output results/mixture.json --picture results/bars.png
sed -n '/^measure /,$p' logs/evaluate.log
echo "models, results and logs are in $OUTPUT"
