# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Sourced by the quickstarts, which define `usage`: reads their command lines, sets up .venv and starts them.

fail() {
    printf 'quickstart.sh: error: %s (see --help)\n' "$*" >&2
    exit 2
}

# check_names "--OPTION ..." ARGUMENTS...: only the names, so that a slip does not show after minutes of set-up.
check_names() {
    local known=" $1 "
    shift
    while (($# > 0)); do
        if [[ $1 == -h || $1 == --help ]]; then
            usage
            exit 0
        fi
        [[ $1 == --* && $known == *" ${1%%=*} "* ]] || fail "unknown argument $1"
        if [[ $1 != *=* ]]; then
            (($# > 1)) || fail "$1 needs a value"
            shift
        fi
        shift
    done
}

# start_quickstart SCRIPT ARGUMENTS...
start_quickstart() {
    source "$root/scripts/lib/python_env.sh"
    use_python_env || exit 1
    exec python "$@"
}
