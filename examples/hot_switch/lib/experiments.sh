# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Runs several trainings one after the other and compares their speed. Source it after ROOT, the repository's folder, is set.

# shellcheck source=examples/hot_switch/lib/llama.sh
source "$ROOT/examples/hot_switch/lib/llama.sh"

CONTEXTS=(4096 8192 16384 32768)

# Every experiment has strategies of its own.
for name in BUCKET_SIZES ALL_PARALLEL_STRATEGY; do
    [[ -z ${!name:-} ]] || launch_error "$name is for llama_hot_switch.sh; unset it, or change configs/hot_switch_strategies.txt"
done

EXPERIMENT="" TOY_HOSTS=""
end_experiments() {
    # shellcheck disable=SC2086 # no word where there is none
    kill $EXPERIMENT 2>/dev/null || true
    wait
    [[ -z $TOY_HOSTS ]] || rm -f "$TOY_HOSTS"
}
trap end_experiments EXIT

# Refuses hosts in $1 that have not $2 GPUs together, before the first experiment has begun.
require_gpus() {
    read_hostfile "$1"
    ((${#HOSTS[@]} * SLOTS == $2)) ||
        launch_error "this experiment needs $2 GPUs, and $1 has $((${#HOSTS[@]} * SLOTS)); give another hostfile"
}

# Runs $2, a script of this folder, with the arguments after it, and keeps its log in OUTPUT under the name $1. With
# DRY_RUN=1 the script prints its command line instead.
run_experiment() {
    local name="$1" script="$ROOT/examples/hot_switch/$2"
    shift 2
    if [[ $DRY_RUN == 1 ]]; then
        "$script" --print "$@"
        return
    fi
    local shown=(cat)
    if [[ ${VERBOSE:-0} != 1 ]]; then
        find_python
        shown=(python -I "$ROOT/scripts/lib/quiet_log.py" /dev/null)
    fi
    mkdir -p "$OUTPUT"
    echo "== $name; log in $OUTPUT/$name.log"
    : >"$OUTPUT/$name.log"
    # Not in the foreground: this shell would end without it.
    VERBOSE=1 "$script" "$@" &>>"$OUTPUT/$name.log" &
    EXPERIMENT=$!
    tail --lines=+1 --follow --pid="$EXPERIMENT" --sleep-interval=0.2 "$OUTPUT/$name.log" | "${shown[@]}"
    wait "$EXPERIMENT"
    EXPERIMENT=""
    SUMMARY+=("$(summary_of "$name")")
}

# Prints the speed in a run's log: medians over all steps but the first, which makes plans and groups, and the second, in whose
# line Megatron tells the mean of both.
summary_of() {
    local name="$1"
    awk -v name="$name" '
        function number(label) {
            return match($0, label "[^0-9]*[0-9.]+") ? substr($0, RSTART + length(label), RLENGTH - length(label)) + 0 : 0
        }
        function median(values, count, i, j, kept) {
            for (i = 1; i < count; i++)
                for (j = i + 1; j <= count; j++)
                    if (values[j] < values[i]) { kept = values[i]; values[i] = values[j]; values[j] = kept }
            return count ? (values[int((count + 1) / 2)] + values[int(count / 2) + 1]) / 2 : 0
        }
        /^tokens of a step: / { each = number("tokens of a step: ") }
        / iteration +[0-9]+\// && / elapsed time per iteration / {
            gsub(/\(ms\): */, "")
            if (++seen <= 2) next
            taken[++count] = number("elapsed time per iteration "); moved[count] = number("switching ")
            # Stock Megatron says none.
            tokens += each ? each : number("tokens: "); total += taken[count]
        }
        END {
            if (!count) { printf "%-24s (fewer than three steps)", name; exit }
            printf "%-24s %12.1f %14.1f %12.0f", name, median(taken, count), median(moved, count), 1000 * tokens / total
        }' "$OUTPUT/$name.log"
}

# Prints what run_experiment has collected.
print_summary() {
    [[ $DRY_RUN == 0 ]] || return 0
    printf '\n%-24s %12s %14s %12s\n' "" "ms per step" "ms switching" "tokens/s"
    printf '%s\n' "${SUMMARY[@]}"
}

# Reads the arguments of HotSPa's small evaluation, whose logs are in OUTPUT under the name $1, and checks what it needs.
begin_small_evaluation() {
    local name="$1"
    shift
    read_options 2 "$@"
    HOSTFILE="${POSITIONAL[0]:-$ROOT/examples/hot_switch/hostfile}"
    DATA_PATH="${POSITIONAL[1]:-${DATA_PATH:-}}"
    STEPS="${STEPS:-10}"
    OUTPUT="${OUTPUT:-$ROOT/outputs/hot_switch}/$name"
    SUMMARY=()
    require_positive STEPS
    [[ ${BACKEND:-gpu} == cpu ]] || require_gpus "$HOSTFILE" 8
    check_data
}

# One case of the paper: a data set, a model and a number of GPUs, with both combinations of strategies at every context.
# The rest are the script's own arguments.
run_paper_case() {
    local dataset="$1" model="$2" gpus="$3" context combination
    shift 3
    read_options 2 "$@"
    local hosts="${POSITIONAL[0]:-$ROOT/examples/hot_switch/hostfile}"
    DATA_PATH="${POSITIONAL[1]:-${DATA_PATH:-}}"
    BACKEND="${BACKEND:-gpu}"
    STEPS="${STEPS:-100}"
    OUTPUT="${OUTPUT:-$ROOT/outputs/hot_switch}/${dataset}_${model}_${gpus}gpus"
    SUMMARY=()
    if [[ $BACKEND == cpu ]]; then
        # The hosts are not used, but tell which strategies the real run has.
        TOY_HOSTS="$(mktemp)"
        hosts="$TOY_HOSTS"
        echo "localhost slots=$gpus" >"$hosts"
    else
        [[ -n ${DATA_ARGS_PATH:-} ]] || DATA_PATH="${DATA_PATH:-$ROOT/outputs/data/$dataset}"
        require_gpus "$hosts" "$gpus"
    fi
    require_positive STEPS
    check_data
    for context in "${CONTEXTS[@]}"; do
        for combination in c1 c2; do
            # At the shortest context the two are the same.
            if ((context > CONTEXTS[0])) || [[ $combination == c1 ]]; then
                run_experiment "${context}_$combination" llama_hot_switch.sh \
                    "$model" "$context" 512 "$hosts" "$STEPS" 1 "$DATA_PATH" "$combination"
            fi
        done
    done
    print_summary
}
