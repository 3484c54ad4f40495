# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the scripts use the arrays
#
# What stock Megatron is given in place of hot switching. Source it after llama_arguments.sh.

# Says in Megatron's own words which strategy there is, and, as its log does not, how many tokens a step predicts.
take_stock_arguments() {
    local sizes
    IFS=, read -r -a sizes <<<"${STRATEGIES[0]}"
    HOT_SWITCH_ARGS=(--tensor-model-parallel-size "${sizes[1]}" --pipeline-model-parallel-size "${sizes[2]}")
    PER_ROW="$CONTEXT"
    [[ $ROWS == packed ]] || take_padded_rows
    [[ $DRY_RUN == 1 ]] || echo "tokens of a step: $(awk "BEGIN { print $(value_of --global-batch-size) * $PER_ROW }")"
}

# Fills up the documents of DATA_PATH to rows of CONTEXT tokens, once, in OUTPUT, and trains on them.
take_padded_rows() {
    local padded found
    padded="$OUTPUT/padded/$(basename "$DATA_PATH")_$CONTEXT"
    if [[ $DRY_RUN == 0 ]]; then
        find_python
        mkdir -p "$OUTPUT/padded"
        found="$(python -m megatron_ext.cli.main data pad "$DATA_PATH" --seq-length "$CONTEXT" --output-prefix "$padded" --reuse)"
        head -n 1 <<<"$found"
        PER_ROW="$(sed -n 's/^tokens predicted in a row: //p' <<<"$found")"
    fi
    DATA_ARGS=("${DATA_ARGS[@]/#"$DATA_PATH"/"$padded"}" --eod-mask-loss)
    # Bytes keep the model's rows of the embedding, of which Megatron would take the last one for the end of a document.
    ((${#VOCABULARY_ARGS[@]} > 0)) || DATA_ARGS+=(--null-tokenizer-eod-id 256)
}

# Prints what follows the option $1 in the arguments; the last one counts, as for Megatron.
value_of() {
    local words=("${TRAINING_ARGS[@]}" ${EXTRA[@]+"${EXTRA[@]}"}) number found=""
    for ((number = 0; number < ${#words[@]}; number++)); do
        if [[ ${words[number]} == "$1" ]]; then found="${words[number + 1]}"; fi
    done
    echo "$found"
}
