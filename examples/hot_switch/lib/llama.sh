# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the scripts use the variables
#
# What the LLaMA scripts share: their arguments, models and strategies. Source it after ROOT, the repository's folder, is set.

# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"
# shellcheck source=scripts/lib/hosts.sh
source "$ROOT/scripts/lib/hosts.sh"

STRATEGY_TABLE="$ROOT/configs/hot_switch_strategies.txt"
MODEL_TABLE="$ROOT/megatron_ext/hot_switch/cost_model/presets.txt"

# Takes --dry-run, --print and --help from a script's arguments: sets DRY_RUN and, unless it is to print alone, EXPLAIN, and
# POSITIONAL to the rest, of which there may be $1.
read_options() {
    local most="$1"
    shift
    DRY_RUN=0 EXPLAIN=0 POSITIONAL=()
    while (($# > 0)); do
        case $1 in
            --dry-run) DRY_RUN=1 EXPLAIN=1 ;;
            --print) DRY_RUN=1 ;;
            -h | --help) answer_help data --help ;;
            -*) refuse_options "$1" ;;
            *) POSITIONAL+=("$1") ;;
        esac
        shift
    done
    ((${#POSITIONAL[@]} <= most)) || launch_error "takes $most arguments, but ${#POSITIONAL[@]} were given; see --help"
}

# Refuses variables (by their names) that are not positive integers.
require_positive() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || launch_error "$name is '${!name}'; give an integer of at least 1; see --help"
    done
}

# Sets MODEL_SIZE_ARGS to the options of the model named $1 (7b, ...) in the table that
# `megatron-ext hot-switch plan --model llama-7b` reads too.
read_model() {
    local words names=() known=() column
    MODEL_SIZE_ARGS=()
    while read -r -a words; do
        case ${words[0]:-#} in
            \#*) ;;
            model) names=("${words[@]}") ;;
            "llama-$1")
                for ((column = 1; column < ${#words[@]}; column++)); do
                    MODEL_SIZE_ARGS+=("--${names[column]}" "${words[column]}")
                done
                return
                ;;
            *) known+=("${words[0]#llama-}") ;;
        esac
    done <"$MODEL_TABLE"
    launch_error "the model '$1' is not known; use one of ${known[*]}"
}

# Sets BUCKETS and STRATEGIES: as BUCKET_SIZES and ALL_PARALLEL_STRATEGY in the environment say, else from the table.
choose_strategies() {
    local model="$1" gpus="$2" context="$3" combination="$4" words contexts=()
    if [[ -n ${BUCKET_SIZES:-}${ALL_PARALLEL_STRATEGY:-} ]]; then
        [[ -n ${BUCKET_SIZES:-} && -n ${ALL_PARALLEL_STRATEGY:-} ]] ||
            launch_error "set both BUCKET_SIZES and ALL_PARALLEL_STRATEGY, or neither"
        split_words BUCKETS "$BUCKET_SIZES"
        split_words STRATEGIES "$ALL_PARALLEL_STRATEGY"
        check_strategies "$gpus" "$context"
        return
    fi
    while read -r -a words; do
        if [[ "${words[*]:0:3}" == "$combination $model $gpus" ]]; then
            contexts+=("${words[3]}")
            if [[ ${words[3]} == "$context" ]]; then
                IFS=, read -r -a BUCKETS <<<"${words[4]}"
                STRATEGIES=("${words[@]:5}")
                return
            fi
        fi
    done <"$STRATEGY_TABLE"
    launch_error "configs/hot_switch_strategies.txt has no strategies ($combination) for $model on $gpus GPUs with a context of" \
        "$context (only of: ${contexts[*]:-none}); set BUCKET_SIZES and ALL_PARALLEL_STRATEGY, which" \
        "\`megatron-ext hot-switch suggest\` proposes"
}

# Reads the arguments of a script that trains with one strategy.
read_one_strategy_arguments() {
    read_options 8 "$@"
    MODEL="${POSITIONAL[0]:-3b}"
    CONTEXT="${POSITIONAL[1]:-4096}"
    GLOBAL_BATCH="${POSITIONAL[2]:-512}"
    MICRO_BATCH="${POSITIONAL[3]:-1}"
    HOSTFILE="${POSITIONAL[4]:-$ROOT/examples/hot_switch/hostfile}"
    STEPS="${POSITIONAL[5]:-100}"
    EPOCHS="${POSITIONAL[6]:-1}"
    DATA_PATH="${POSITIONAL[7]:-${DATA_PATH:-}}"
    BACKEND="${BACKEND:-gpu}"
    require_positive CONTEXT GLOBAL_BATCH MICRO_BATCH STEPS EPOCHS
}

# Reads MODEL and HOSTFILE, and sets BUCKETS and STRATEGIES to one strategy: ALL_PARALLEL_STRATEGY, or the one that the table gives
# the longest documents, because it fits.
choose_one_strategy() {
    read_model "$MODEL"
    read_hostfile "$HOSTFILE"
    if [[ -n ${ALL_PARALLEL_STRATEGY:-} ]]; then
        STRATEGIES=("$ALL_PARALLEL_STRATEGY") BUCKETS=("$CONTEXT" 0)
        check_strategies $((${#HOSTS[@]} * SLOTS)) "$CONTEXT"
    else
        choose_strategies "$MODEL" $((${#HOSTS[@]} * SLOTS)) "$CONTEXT" c1
        STRATEGIES=("${STRATEGIES[0]}")
    fi
    BUCKETS=("$CONTEXT" 0)
}

# Refuses BUCKET_SIZES and ALL_PARALLEL_STRATEGY of a user's that cannot be, before anything starts on other hosts.
check_strategies() {
    local gpus="$1" context="$2" strategy sizes size above=""
    for strategy in "${STRATEGIES[@]}"; do
        [[ $strategy =~ ^[1-9][0-9]{0,4},[1-9][0-9]{0,4},[1-9][0-9]{0,4}$ ]] ||
            launch_error "ALL_PARALLEL_STRATEGY has '$strategy'; give DP,TP,PP such as 1,4,2"
        IFS=, read -r -a sizes <<<"$strategy"
        ((sizes[0] * sizes[1] * sizes[2] == gpus)) ||
            launch_error "ALL_PARALLEL_STRATEGY has $strategy, which is for $((sizes[0] * sizes[1] * sizes[2])) GPUs, but there are $gpus"
    done
    ((${#BUCKETS[@]} == ${#STRATEGIES[@]} + 1)) ||
        launch_error "BUCKET_SIZES has ${#BUCKETS[@]} sizes; ${#STRATEGIES[@]} strategies need one more than their number"
    for size in "${BUCKETS[@]}"; do
        [[ $size =~ ^(0|[1-9][0-9]{0,8})$ ]] || launch_error "BUCKET_SIZES has '$size', which is not a number of tokens"
        [[ -z $above ]] || ((size < above)) || launch_error "BUCKET_SIZES do not descend: $size comes after $above"
        above=$size
    done
    ((BUCKETS[0] == context)) || launch_error "BUCKET_SIZES begins with ${BUCKETS[0]}, but the context is $context; make them equal"
    ((above == 0)) || launch_error "BUCKET_SIZES ends with $above; end it with 0, so that no short sequence is lost"
}

# Refuses a GLOBAL_BATCH that home cannot divide, before anything starts on other hosts.
check_batch() {
    local home="${STRATEGIES[0]}"
    local together=$((${home%%,*} * MICRO_BATCH))
    ((GLOBAL_BATCH % together == 0)) ||
        launch_error "GLOBAL_BATCH is $GLOBAL_BATCH, which is not a multiple of $together, the DP ${home%%,*} of home ($home) times a" \
            "micro-batch of $MICRO_BATCH; give a multiple"
}

# Refuses a DATA_PATH without files, of no vocabulary or another one, and one for mock data that is not there; sets
# VOCABULARY_ARGS to the tokenizer's options, and to none for bytes, which are ids in any model's vocabulary. A dry run
# does the same where data and a Python are on this machine.
check_data() {
    local how="make it with examples/hot_switch/create_web_dataset.sh or \`megatron-ext data prepare\`"
    VOCABULARY_ARGS=() DATA_ARGS_PATH="${DATA_ARGS_PATH:-}"
    read_extra_args
    check_vocabulary_variables
    if [[ -n $DATA_PATH && -n $DATA_ARGS_PATH ]]; then
        launch_error "DATA_PATH is $DATA_PATH and DATA_ARGS_PATH $DATA_ARGS_PATH; set one of them"
    fi
    check_files DATA_ARGS_PATH
    if [[ -z $DATA_PATH$DATA_ARGS_PATH$TOKENIZER$VOCAB_SIZE$VOCAB_FILE ]]; then
        return
    fi
    if [[ -n $DATA_PATH && ! -f $DATA_PATH.idx ]]; then
        [[ $DRY_RUN == 1 ]] || launch_error "DATA_PATH: there is no $DATA_PATH.idx; $how, and give its prefix"
        take_unchecked_vocabulary "there is no $DATA_PATH.idx on this machine"
        return
    fi
    if [[ $DRY_RUN == 1 ]] && ! (find_python) &>/dev/null; then
        take_unchecked_vocabulary "there is no Python with torch and megatron.core on this machine"
        return
    fi
    read_vocabulary
    if [[ -z $VOCAB_SIZE && ${VOCABULARY_ARGS[*]} == "--tokenizer-type NullTokenizer --vocab-size 257" ]]; then
        VOCABULARY_ARGS=()
    fi
}

# Sets VOCABULARY_ARGS to what the variables say; where none does, says that data may be of another one ($1 is why).
take_unchecked_vocabulary() {
    if [[ -n $TOKENIZER ]]; then
        VOCABULARY_ARGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    elif [[ -n $VOCAB_SIZE ]]; then
        VOCABULARY_ARGS=(--tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
    elif [[ -n $VOCAB_FILE ]]; then
        VOCABULARY_ARGS=(--vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
    else
        echo "$(basename "$0"): DATA_PATH: $1: the dry run takes bytes, but a start takes what the record of the data says" >&2
    fi
}

# Checks BACKEND and the hosts, puts a Python on the PATH, and starts training with the arrays of llama_arguments.sh and
# the words of EXTRA, which check_data has read.
start_llama() {
    case $BACKEND in
        gpu)
            # Megatron overlaps communication with computation in the order that one connection keeps.
            export CUDA_DEVICE_MAX_CONNECTIONS=1
            # Strategies take and give up large tensors in every step.
            export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
            if [[ $DRY_RUN == 0 ]] && is_this_machine "${HOSTS[0]}" && ! nvidia-smi -L &>/dev/null; then
                launch_error "no NVIDIA GPU here (nvidia-smi finds none); BACKEND=cpu starts the same job at toy size"
            fi
            ;;
        cpu) export CUDA_VISIBLE_DEVICES= ;;
    esac
    if [[ $DRY_RUN == 1 && $EXPLAIN == 0 ]] && ! (find_python) &>/dev/null; then
        # The command line is available without a Python that could run it.
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    else
        find_python
    fi
    # Megatron's own script needs no change: torchrun ... -m megatron_ext /path/to/Megatron-LM/pretrain_gpt.py ...
    local arguments=(
        "${GPT_MODEL_ARGS[@]}"
        "${TRAINING_ARGS[@]}"
        "${MODEL_PARALLEL_ARGS[@]}"
        "${HOT_SWITCH_ARGS[@]}"
        "${DATA_ARGS[@]}"
        "${EVAL_AND_LOGGING_ARGS[@]}"
        ${EXTRA[@]+"${EXTRA[@]}"}
    )
    local log="${OUTPUT:-$ROOT/outputs/hot_switch}/logs/$(basename "$0" .sh)_${MODEL}_$CONTEXT"
    if [[ $EXPLAIN == 1 ]]; then
        local lines
        lines="$(train_on_hosts "$log" "$ROOT/examples/pretrain_gpt.py" "${arguments[@]}")"
        show_command "$SLOTS" "${#HOSTS[@]}" "$lines" "${arguments[@]}"
    fi
    train_on_hosts "$log" "$ROOT/examples/pretrain_gpt.py" "${arguments[@]}"
}
