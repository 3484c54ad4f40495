# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034 # the scripts use the variables
#
# Hostfiles, commands over ssh, and one torchrun on every host. Source it after examples/local_sgd/lib/launch.sh.

# Reads a hostfile into HOSTS and SLOTS, the GPUs of each of them.
read_hostfile() {
    local file="$1" line host slots number=0 first=0 named
    [[ -f $file && -r $file ]] ||
        launch_error "hostfile: there is no file $file; write a line like '10.0.0.1 slots=8' for every host"
    HOSTS=() SLOTS=0
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        line="${line%%#*}"
        line="${line%$'\r'}"
        [[ -n ${line//[[:space:]]/} ]] || continue
        # No name begins with a dash: ssh would take it for an option.
        if [[ ! $line =~ ^[[:space:]]*([A-Za-z0-9_][A-Za-z0-9_.:@-]*)[[:space:]]+slots=([1-9][0-9]{0,3})[[:space:]]*$ ]]; then
            launch_error "$file, line $number: '$line' is not of the form 'HOST slots=N' with N of at least 1"
        fi
        host="${BASH_REMATCH[1]}" slots="${BASH_REMATCH[2]}"
        for named in ${HOSTS[@]+"${HOSTS[@]}"}; do
            [[ $named != "$host" ]] || launch_error "$file, line $number: $host is there already; give a host one line"
        done
        if ((SLOTS > 0 && slots != SLOTS)); then
            launch_error "$file, line $number: slots=$slots, but line $first has $SLOTS; give all hosts the same number"
        fi
        if ((SLOTS == 0)); then
            first=$number
        fi
        SLOTS=$slots
        HOSTS+=("$host")
    done <"$file"
    ((SLOTS > 0)) || launch_error "$file: has no host; write a line like '10.0.0.1 slots=8' for every one"
    if ((${#HOSTS[@]} > 1)); then
        for host in "${HOSTS[@]}"; do
            case ${host#*@} in
                localhost | 127.* | ::1)
                    launch_error "$file: $host is one of several hosts; give the name by which the others reach it"
                    ;;
            esac
        done
    fi
}

is_this_machine() {
    local host="${1#*@}" address
    case $host in
        localhost | 127.* | ::1 | "$HOSTNAME" | "${HOSTNAME%%.*}") return 0 ;;
    esac
    for address in $(hostname -I 2>/dev/null); do
        [[ $host != "$address" ]] || return 0
    done
    return 1
}

# Sets JOB to the command that starts torchrun on host number $1 of HOSTS, with the training script and its arguments
# after it: here, or over ssh in the same folder with what the environment says about communication.
job_on_host() {
    local node="$1" host="${HOSTS[$1]}" master=localhost name
    shift
    if ((${#HOSTS[@]} > 1)) || ! is_this_machine "${HOSTS[0]}"; then
        master="${HOSTS[0]#*@}"
    fi
    JOB=(
        torchrun
        --nproc_per_node "$SLOTS"
        --nnodes "${#HOSTS[@]}"
        --node_rank "$node"
        --master_addr "$master"
        --master_port "${MASTER_PORT:-29500}"
        "$@"
    )
    if ! is_this_machine "$host"; then
        over_ssh "$host" "${JOB[@]}"
    elif [[ $DRY_RUN == 1 ]]; then
        # What is exported here is not where the line is read.
        read_variables
        JOB=(env "${VARIABLES[@]}" "${JOB[@]}")
    fi
}

# Sets JOB to a command on host $1, over ssh in the same folder with what the environment says about communication and in
# the variables named in PASSED_ON.
over_ssh() {
    local host="$1"
    shift
    read_variables
    # The terminal (-tt) hangs up when this end goes away, which ends training there as well.
    JOB=(ssh -tt -o BatchMode=yes "$host" "cd $(quoted "$PWD") && exec env $(quoted "${VARIABLES[@]}" "$@")")
}

# Sets VARIABLES to what a job takes from this environment, as NAME=VALUE.
read_variables() {
    local name
    VARIABLES=("PATH=$PATH" "PYTHONPATH=${PYTHONPATH:-}")
    for name in $(compgen -e); do
        case $name in
            CUDA_* | NCCL_* | GLOO_* | UCX_* | TORCH_* | PYTORCH_* | OMP_NUM_THREADS) VARIABLES+=("$name=${!name}") ;;
            *) [[ " ${PASSED_ON[*]-} " != *" $name "* ]] || VARIABLES+=("$name=${!name}") ;;
        esac
    done
}

# Prints words so that a shell reads them back.
quoted() {
    local word words=()
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            words+=("$word")
        else
            words+=("${word@Q}")
        fi
    done
    printf '%s' "${words[*]}"
}

# train_on_hosts LOG ARGUMENTS...: runs a training script with arguments on all hosts, and shows them as start_job does: all of it is
# in LOG.log, with several hosts in LOG_node0.log, .... With DRY_RUN=1 prints what would be started, a line for each host.
train_on_hosts() {
    local node log="$1" pids=() status=0
    shift
    for node in "${!HOSTS[@]}"; do
        job_on_host "$node" "$@"
        if [[ $DRY_RUN == 1 ]]; then
            quoted "${JOB[@]}" && echo
        elif ((${#HOSTS[@]} == 1)); then
            start_job "$log.log" "${JOB[@]}"
        else
            start_job "${log}_node$node.log" "${JOB[@]}" </dev/null &
            pids+=($!)
        fi
    done
    ((${#pids[@]} > 0)) || return 0
    # shellcheck disable=SC2064 # of these jobs
    trap "kill ${pids[*]} 2>/dev/null || true; wait" EXIT
    for node in "${!HOSTS[@]}"; do
        wait -n || {
            status=$?
            echo "$(basename "$0"): error: a host's job ended with exit code $status; ending the others" >&2
            break
        }
    done
    exit "$status"
}
