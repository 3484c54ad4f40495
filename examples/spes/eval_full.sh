#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Evaluates a Hugging Face model on the tasks of SPES' paper, with lm-evaluation-harness.
#
#   eval_full.sh MODEL_PATH NAME [FURTHER ARGUMENTS OF megatron-ext evaluate]
#
# The tasks download their questions, unless they are local ones of TASK_FILES.
#
# Environment:
#   TASKS          tasks, each with the number of its solved examples, as sciq:0,arc_challenge:25 (those of the paper)
#   TASK_FILES     folder of further tasks in YAML, as lm-evaluation-harness reads them
#   BASELINES      results of other models to set beside it, as "outputs/spes/eval/dense.json ..."
#   BATCH_SIZE     sequences at a time (8)
#   RESULTS        folder of NAME.json and NAME.png (outputs/spes/eval)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
(($# >= 2)) || launch_error "give MODEL_PATH NAME, as in $(basename "$0") outputs/spes/node0/50000-hf spes-1b"
refuse_options "${@:1:2}"
MODEL_PATH="$1" NAME="$2"
shift 2
[[ -f $MODEL_PATH/config.json ]] || launch_error "MODEL_PATH '$MODEL_PATH': no config.json; convert_model_to_hf_unshard.sh makes one"
RESULTS="${RESULTS:-$ROOT/outputs/spes/eval}"
TASKS="${TASKS:-sciq:0,piqa:0,winogrande:0,arc_easy:0,social_iqa:0,openbookqa:0,boolq:0,arc_challenge:25,hellaswag:10,ceval-valid,cmmlu,mmlu}"
COMPARED=()
for file in ${BASELINES:-}; do
    COMPARED+=(--baseline "$file")
done
find_python

exec python -m megatron_ext.cli.main evaluate "$MODEL_PATH" \
    --name "$NAME" \
    --tasks "$TASKS" \
    --batch-size "${BATCH_SIZE:-8}" \
    --output "$RESULTS/$NAME.json" \
    --picture "$RESULTS/$NAME.png" \
    ${TASK_FILES:+--task-files "$TASK_FILES"} \
    ${COMPARED[@]+"${COMPARED[@]}"} \
    "$@"
