#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv when needed, then runs the linter, the type checker and the tests.
#
#   ./tests/run.sh                        all tests but those marked slow, two files at a time
#   ./tests/run.sh --all                  with the tests marked slow
#   ./tests/run.sh tests/params -k tied   further arguments go to pytest
#   ./tests/run.sh --megatron-release 0.18.2   patches and a short set of tests on another release of the index instead
#
# The exit code is pytest's; it is 1 when only the linter or the type checker complained. "No test ran" (pytest's
# exit code 5) is a failure like any other.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
source "$root/scripts/lib/python_env.sh"

pytest_args=()
chosen=""
with_slow=""
for arg in "$@"; do
    if [[ $arg == --help || $arg == -h ]]; then
        sed -n '4,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
    fi
    if [[ $arg == --all ]]; then
        with_slow=yes
    else
        pytest_args+=("$arg")
        chosen=yes
    fi
done
if [[ -z $chosen ]]; then
    # Two files at once, for two processors: a test of several processes has enough for both by itself, and where changes
    # between processes are dear, as on virtual machines that are virtual themselves, a third file costs more than it
    # fills. Not the files with most tests first: those with few have the longest ones, and would come last.
    pytest_args+=(-n 2 --dist loadfile --no-loadscope-reorder --durations=25)
    if [[ -z $with_slow ]]; then
        pytest_args+=(-m "not slow")
    fi
fi

if [[ ${1:-} == --megatron-release ]]; then
    use_python_env || exit 1
    cd "$root"
    other=".venv/megatron-${2:?--megatron-release: give the release, such as 0.18.2}"
    if [[ ! -d $other ]]; then
        python -m pip install --quiet --no-deps --target "$other.new" "megatron-core==$2"
        mv "$other.new" "$other"
    fi
    exec python -m tests.versions --megatron="$other" --dry-run
fi

use_python_env || exit 1
# Paths given by the caller are relative to the repository root, as in the examples above.
cd "$root"

checks_failed=""
echo "[check] ruff"
ruff check . || checks_failed+=" ruff"
echo "[check] mypy"
mypy || checks_failed+=" mypy"

if [[ -z $chosen ]]; then
    # Megatron compiles a piece of C++ when recomputation first wants it, once per environment: minutes on a slow
    # machine, for which no test's time limit has room.
    echo "[check] Megatron's extension"
    python -m tests.support.extension 2>/dev/null ||
        echo "[check] note: it could not be compiled; tests with recomputation fail"
fi

echo "[check] pytest"
status=0
python -m pytest "${pytest_args[@]+"${pytest_args[@]}"}" || status=$?
if ((status == 5)); then
    echo "[check] failed: no test was selected" >&2
fi
if [[ -n $checks_failed ]]; then
    echo "[check] failed in addition to the tests:$checks_failed (see above)" >&2
    if ((status == 0)); then
        status=1
    fi
fi
exit "$status"
