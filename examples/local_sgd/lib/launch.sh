# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034,SC2054 # the arrays and paths are used by the scripts
#
# What the launch scripts share. Source it after ROOT, the repository's folder, is set.

# Where the first of the script's arguments is --help or -h, prints the comment at its head and ends; with $1 `data` also
# what the scripts have in common that train on data. It is the one place that names a script's variables and defaults.
answer_help() {
    case ${2:-} in
        -h | --help) ;;
        *) return 0 ;;
    esac
    sed -n '4,/^$/s/^# \{0,1\}//p' "$0"
    [[ $1 != data ]] || cat <<'TEXT'

Data, in the environment:
  DATA_PATH       prefix of a corpus (.bin and .idx), which `megatron-ext data prepare` makes; without it mock data
  DATA_ARGS_PATH  instead of it a list of several, which `megatron-ext data list` makes
  TOKENIZER       a Hugging Face tokenizer's folder, or a name of the hub: that of data without a record beside them. Those of
                  data prepare have one, against which it is checked
  VOCAB_SIZE      or the number of ids
  VOCAB_FILE, MERGE_FILE  or GPT-2's files
  EXTRA_ARGS      further arguments of Megatron, separated by spaces, which come last; none of them chooses data or vocabulary
TEXT
    exit 0
}

# Refuses words that begin with a dash, in place of paths and names: they are options that the script does not have.
refuse_options() {
    local word
    for word in "$@"; do
        [[ $word != -* ]] || launch_error "does not know the option $word; see --help"
    done
}

# Makes the paths in the variables of these names, where they are set, hold in every folder.
make_absolute() {
    local name
    for name in "$@"; do
        [[ -z ${!name:-} || ${!name} == /* ]] || printf -v "$name" '%s/%s' "$PWD" "${!name}"
    done
}

# Takes --dry-run out of a script's arguments: sets DRY_RUN to 1 where it is among them, else 0, and REST to the others.
read_dry_run() {
    local word
    DRY_RUN=0 REST=()
    for word in "$@"; do
        if [[ $word == --dry-run ]]; then DRY_RUN=1; else REST+=("$word"); fi
    done
}

# start_job FILE COMMAND...: gives its place to a command: torchrun with its options, a training script, and the script's arguments,
# and shows it as run_quietly does, unless VERBOSE is 1. In a dry run it prints it and says what it would do, or refuses it alone.
start_job() {
    if [[ $DRY_RUN != 1 ]]; then
        [[ ${VERBOSE:-0} != 1 ]] || exec "${@:2}"
        run_quietly "$@"
    fi
    shift
    local command=("$@") processes=1 nodes=1
    while [[ $1 != *.py ]]; do
        case $1 in
            --nproc_per_node) processes="$2" ;;
            --nnodes) nodes="$2" ;;
        esac
        shift
    done
    show_command "$processes" "$nodes" "$(printf '%q ' "${command[@]}")" "${@:2}"
}

# Prints $3, the command lines that start a training script with the arguments after it, and what explain_command says of them,
# and ends; where that refuses them, its error is all that is shown.
show_command() {
    local said status=0
    said="$(explain_command "$1" "$2" "${@:4}")" || status=$?
    ((status != 0)) || printf '%s\n' "$3"
    [[ -z $said ]] || printf '%s\n' "$said"
    exit "$status"
}

# Says what a training script would do with the arguments after $1, the processes of a node, and $2, the number of nodes, and
# ends with the status of that: an error for a command that is refused.
explain_command() {
    local backend=cuda
    [[ $BACKEND == gpu ]] || backend=cpu
    exec python -m megatron_ext.cli.main explain --nproc-per-node "$1" --nnodes "$2" --backend "$backend" -- "${@:3}"
}

# Sets the array named $1 to the words of $2, which may be on several lines.
split_words() {
    local -n split_into="$1"
    read -r -a split_into <<<"${2//$'\n'/ }"
}

# Sets EXTRA to the words of EXTRA_ARGS. Refuses those that choose data or their vocabulary, which the variables do: these
# are looked at before anything starts.
read_extra_args() {
    local word instead
    split_words EXTRA "${EXTRA_ARGS:-}"
    for word in ${EXTRA[@]+"${EXTRA[@]}"}; do
        case ${word%%=*} in
            --data-path | --train-data-path | --valid-data-path | --test-data-path | --data-args-path | \
                --per-split-data-args-path)
                instead="set DATA_PATH, or for several corpora DATA_ARGS_PATH"
                ;;
            --mock-data) instead="leave DATA_PATH empty" ;;
            --tokenizer-type | --tokenizer-model | --tokenizer-metadata | --tokenizer-special-tokens)
                instead="set TOKENIZER, VOCAB_SIZE, or VOCAB_FILE and MERGE_FILE"
                ;;
            --vocab-size | --padded-vocab-size | --vocab-extra-ids | --null-tokenizer-eod-id) instead="set VOCAB_SIZE" ;;
            --vocab-file | --merge-file) instead="set VOCAB_FILE and MERGE_FILE" ;;
            *) continue ;;
        esac
        launch_error "EXTRA_ARGS has ${word%%=*}, which is not checked against the data; $instead"
    done
}

launch_error() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Sets CHECKPOINT_PATH, TENSORBOARD_LOGS_PATH, DATA_PATH, VOCAB_FILE and MERGE_FILE from the script's arguments, the last
# three from the environment where they are not among them. $1 is the folder in outputs/ for the first two when they are
# not given.
read_paths() {
    local output="$ROOT/outputs/$1"
    shift
    refuse_options "$@"
    case $# in
        0 | 1 | 2 | 3 | 5) ;;
        *) launch_error "takes [CHECKPOINT_PATH [TENSORBOARD_LOGS_PATH [VOCAB_FILE MERGE_FILE] DATA_PATH]]," \
            "but $# arguments were given" ;;
    esac
    CHECKPOINT_PATH="${1:-$output/checkpoints}"
    TENSORBOARD_LOGS_PATH="${2:-$output/tensorboard}"
    DATA_PATH="${DATA_PATH:-}"
    if (($# == 3)); then
        DATA_PATH="$3"
    elif (($# == 5)); then
        VOCAB_FILE="$3" MERGE_FILE="$4" DATA_PATH="$5"
    fi
    check_data_files
}

# Refuses a DATA_PATH without files, and what is half a vocabulary, several, or one for no data. Sets DATA_ARGS_PATH, which
# is a list of corpora instead of one, to nothing where it is not set.
check_data_files() {
    DATA_ARGS_PATH="${DATA_ARGS_PATH:-}"
    if [[ -n $DATA_PATH && -n $DATA_ARGS_PATH ]]; then
        launch_error "DATA_PATH is $DATA_PATH and DATA_ARGS_PATH $DATA_ARGS_PATH; set one of them"
    fi
    check_files DATA_ARGS_PATH
    if [[ -n $DATA_PATH && ! -f $DATA_PATH.idx ]]; then
        launch_error "DATA_PATH: there is no $DATA_PATH.idx; give the prefix that \`megatron-ext data prepare\`" \
            "or Megatron's preprocess_data.py wrote, without .bin and .idx"
    fi
    check_vocabulary_variables
    local name
    for name in VOCAB_FILE TOKENIZER VOCAB_SIZE; do
        if [[ -n ${!name} && -z $DATA_PATH$DATA_ARGS_PATH ]]; then
            launch_error "$name is for the data of a DATA_PATH, which is not set; mock data are bytes"
        fi
    done
}

# Sets the variables of a vocabulary that are not set to nothing, and refuses half a vocabulary.
check_vocabulary_variables() {
    TOKENIZER="${TOKENIZER:-}" VOCAB_SIZE="${VOCAB_SIZE:-}" VOCAB_FILE="${VOCAB_FILE:-}" MERGE_FILE="${MERGE_FILE:-}"
    if [[ -n $VOCAB_FILE && -z $MERGE_FILE ]] || [[ -z $VOCAB_FILE && -n $MERGE_FILE ]]; then
        launch_error "VOCAB_FILE is '$VOCAB_FILE' and MERGE_FILE '$MERGE_FILE'; set both, or neither"
    fi
    check_counts VOCAB_SIZE
}

# Sets VOCABULARY_ARGS to the options of the tokenizer of DATA_PATH or DATA_ARGS_PATH: what the record says (PREFIX.json, which
# `megatron-ext data prepare` writes), else TOKENIZER, VOCAB_SIZE, or VOCAB_FILE and MERGE_FILE. Refuses data without
# either, two that disagree, and ids beyond the vocabulary. Without DATA_PATH, the variables alone are looked at.
read_vocabulary() {
    local given=() printed
    find_python
    [[ -z $TOKENIZER ]] || given+=(--tokenizer "$TOKENIZER")
    [[ -z $VOCAB_SIZE ]] || given+=(--vocab-size "$VOCAB_SIZE")
    [[ -z ${DATA_ARGS_PATH:-} ]] || given+=(--data-args-path "$DATA_ARGS_PATH")
    [[ -z $VOCAB_FILE ]] || given+=(--vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
    printed="$(python -m megatron_ext.cli.main data check --for-script ${given[@]+"${given[@]}"} -- \
        ${DATA_PATH:+"$DATA_PATH"})" || exit 1
    mapfile -t VOCABULARY_ARGS <<<"$printed"
}

# Fills DATA_ARGS: mock data without a DATA_PATH or DATA_ARGS_PATH, which are bytes, else that with the vocabulary of its ids.
set_data_args() {
    # Megatron does not return from building a split that gets no document, so that a toy's splits are larger.
    local split=949,50,1
    if [[ $BACKEND == cpu ]]; then
        split=90,5,5
    fi
    if [[ -z $DATA_PATH$DATA_ARGS_PATH ]]; then
        DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 257)
    else
        read_vocabulary
        DATA_ARGS=(${DATA_PATH:+--data-path "$DATA_PATH"} ${DATA_ARGS_PATH:+--data-args-path "$DATA_ARGS_PATH"}
            "${VOCABULARY_ARGS[@]}")
    fi
    DATA_ARGS+=(--split "$split")
}

# Puts a Python with torch and megatron.core on the PATH: the caller's (a container's or an active environment's),
# else the repository's .venv. Nothing is installed here: nodes of a cluster must not do that at the same time.
find_python() {
    local probe='import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("megatron.core")))'
    if ! { command -v torchrun && python -c "$probe"; } &>/dev/null; then
        if ! "$ROOT/.venv/bin/python" -c "$probe" &>/dev/null; then
            launch_error "no Python with torch and megatron.core: activate an environment that has them, or run" \
                "examples/quickstart.sh once, which makes .venv"
        fi
        export PATH="$ROOT/.venv/bin:$PATH"
    fi
    # So that a container's Python finds this checkout without an installation.
    [[ ${PYTHONPATH:-} == "$ROOT" || ${PYTHONPATH:-} == "$ROOT":* ]] ||
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# run_quietly FILE COMMAND...: shows a command's output without the noise of Megatron and torch, keeps all of it in FILE, passes
# signals on, and exits with the command's status when the last line is shown.
run_quietly() {
    local filter=(python -I "$ROOT/scripts/lib/quiet_log.py" "$1") filters=() job status=0
    mkdir -p "$(dirname "$1")"
    : >>"$1" || launch_error "$1 cannot be written, which is where the log goes"
    shift
    exec 3> >("${filter[@]}")
    filters+=($!)
    exec 4> >("${filter[@]}" >&2)
    filters+=($!)
    # A shell has its background jobs ignore interrupts, unless they have a process group of their own.
    set -m
    "$@" </dev/null >&3 2>&4 3>&- 4>&- &
    job=$!
    set +m
    exec 3>&- 4>&-
    # shellcheck disable=SC2064 # of this job
    trap "kill -TERM $job" TERM HUP
    # shellcheck disable=SC2064 # likewise
    trap "kill -INT -- -$job" INT # as a terminal does it
    while kill -0 "$job" 2>/dev/null; do
        wait "$job" || true # a signal ends it early
    done
    wait "$job" || status=$?
    wait "${filters[@]}" || true
    exit "$status"
}

# lock_file FILE REFUSAL...: holds FILE for this process and all that it starts; refuses where another one does.
lock_file() {
    local status=0
    { mkdir -p "$(dirname "$1")" && : >>"$1"; } 2>/dev/null || launch_error "$1 cannot be written"
    exec {LOCK}>>"$1"
    flock --nonblock --conflict-exit-code 9 "$LOCK" || status=$?
    ((status != 9)) || launch_error "${*:2} ($1 is locked)"
    ((status == 0)) || echo "$(basename "$0"): $1 cannot be locked, so that a second start is not noticed" >&2
}

# Whether $1 is a whole number, 0 or more, with no more digits than shell arithmetic can take.
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,17})$ ]]; }

# Checks that the variables of these names, where they are set, are whole numbers above 0, and ports such as there are.
check_counts() {
    local name
    for name in "$@"; do
        if [[ -n ${!name:-} ]] && { [[ ${!name} == 0 ]] || ! is_number "${!name}"; }; then
            launch_error "$name is '${!name}'; give a whole number above 0"
        fi
        if [[ $name == *PORT && -n ${!name:-} ]] && ((${!name} > 65535)); then
            launch_error "$name is '${!name}'; give a port, 1 to 65535"
        fi
    done
}

# Checks that the variables of these names, where they are set, are files that can be read.
check_files() {
    local name
    for name in "$@"; do
        if [[ -n ${!name:-} && ! (-f ${!name} && -r ${!name}) ]]; then
            launch_error "$name: there is no file ${!name}, or it cannot be read"
        fi
    done
}

# Checks BACKEND and, for cpu, replaces the arrays by those of a toy run; after read_dry_run.
choose_backend() {
    check_counts GPUS_PER_NODE NUM_NODES TRAIN_ITERS MASTER_PORT
    case $BACKEND in
        gpu)
            if [[ $DRY_RUN == 0 ]] && ! nvidia-smi -L &>/dev/null; then
                launch_error "no NVIDIA GPU here (nvidia-smi finds none); BACKEND=cpu starts the same job at toy size"
            fi
            # Megatron overlaps communication with computation in the order that one connection keeps.
            export CUDA_DEVICE_MAX_CONNECTIONS=1
            ;;
        cpu)
            export CUDA_VISIBLE_DEVICES=
            # shellcheck source=examples/local_sgd/lib/toy_size_on_cpu.sh
            source "$ROOT/examples/local_sgd/lib/toy_size_on_cpu.sh"
            ;;
        *) launch_error "BACKEND=$BACKEND is unknown; use gpu or cpu" ;;
    esac
}

# Checks METHOD and, for edit, adds the pseudo-gradient penalty to LOCAL_SGD_ARGS.
choose_method() {
    case ${METHOD:-diloco} in
        diloco) ;;
        edit)
            LOCAL_SGD_ARGS+=(
                --local-sgd-skip-anomaly
                --local-sgd-ewma-warmup-steps 10
                --local-sgd-pseudo-gradnorm-reduce
                --local-sgd-clip-pseudo-grad 10
                --outer-optimizer-momentum 0.8
            )
            ;;
        *) launch_error "METHOD=$METHOD is unknown; use diloco or edit" ;;
    esac
}
