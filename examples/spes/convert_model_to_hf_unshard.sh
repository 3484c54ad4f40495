#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Writes one iteration of a run as a Hugging Face model, in RUN_DIR/STEP-hf.
#
#   convert_model_to_hf_unshard.sh RUN_DIR STEP SIZE [FURTHER ARGUMENTS OF megatron-ext convert to-hf]
#
# RUN_DIR is a peer's checkpoint folder (--save), or the server's (STATE_DIR), whose newest round it is then: STEP is latest.
# SIZE is 1b, 7b or 9b, or toy.
#
# Environment:
#   OUT            folder of the model (RUN_DIR/STEP-hf)
#   DTYPE          type of the weights: bf16, fp32 or fp16 (bf16)
#   TOKENIZER      folder of a Hugging Face tokenizer, which goes with the model
#   HF_CONFIG      a Hugging Face model of the same architecture, or the checkpoint that the run began with; the server's
#                  folder needs it

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
(($# >= 3)) || launch_error "give RUN_DIR STEP SIZE, as in $(basename "$0") outputs/spes/node0 50000 1b"
refuse_options "${@:1:3}"
RUN_DIR="$1" STEP="$2" SIZE="$3"
shift 3
case $SIZE in
    1b | 7b | 9b | toy) ;;
    *) launch_error "SIZE is '$SIZE'; use 1b, 7b or 9b" ;;
esac
[[ -d $RUN_DIR ]] || launch_error "RUN_DIR '$RUN_DIR': no such folder"
CHOICE=()
if [[ $STEP != latest ]]; then
    [[ ${STEP#step} =~ ^[0-9]{1,15}$ ]] || launch_error "STEP is '$STEP'; give an iteration, or latest"
    CHOICE=(--iteration "$((10#${STEP#step}))")
fi
find_python

exec python -m megatron_ext.cli.main convert to-hf "$RUN_DIR" "${OUT:-${RUN_DIR%/}/$STEP-hf}" \
    --dtype "${DTYPE:-bf16}" \
    ${CHOICE[@]+"${CHOICE[@]}"} \
    ${TOKENIZER:+--tokenizer "$TOKENIZER"} \
    ${HF_CONFIG:+--hf-config "$HF_CONFIG"} \
    "$@"
