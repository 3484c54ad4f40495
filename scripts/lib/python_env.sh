# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Finds a Python >= 3.12, makes the virtual environment .venv in the repository root once, and reuses it. Source
# this file from a bash script, then call `use_python_env || exit 1`: from there on `python`, `torchrun` and
# `megatron-ext` are those of .venv.
#
# MEGATRON_EXT_PYTHON   a command or path of the Python to use; nothing else is tried when it is set.
#
# What is installed: this checkout (editable) with the extras below, at the versions of constraints.txt. The
# quickstart and the tests use the same environment, so the download happens once.

PYTHON_ENV_EXTRAS="tests,plots,data,sync,muon,instances,docs"
PYTHON_ENV_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
PYTHON_ENV_DIR="$PYTHON_ENV_ROOT/.venv"
# Written first: says that the folder is ours, so that it may be removed when it is incomplete. Of others only an empty one is.
PYTHON_ENV_MARKER="$PYTHON_ENV_DIR/.made-by-megatron-ext"
# Written last: says that the installation finished, and from which inputs. No stamp = half-made.
PYTHON_ENV_STAMP="$PYTHON_ENV_DIR/.megatron-ext-stamp"
PYTHON_ENV_LOG="$PYTHON_ENV_DIR/install.log"

_env_say() { printf '[set-up] %s\n' "$*"; }
_env_fail() { printf '[set-up] error: %s\n' "$*" >&2; }

# ------------------------------------------------------------------------------------------------------------
# Finding the interpreter
# ------------------------------------------------------------------------------------------------------------

# Starts the command $1 and sets PROBE_VERSION ("3.12.1") and PROBE_PATH; returns 1 with PROBE_PROBLEM when it
# cannot be used. That the file is there proves nothing: a pyenv shim exists for every version but starts only the
# selected one, and Debian's python3 lacks ensurepip. PROBE_PATH is the real interpreter behind a shim or a
# virtual environment, so that .venv never depends on either.
_probe_python() {
    local answer
    PROBE_VERSION="" PROBE_PATH="" PROBE_PROBLEM=""
    if ! answer="$("$1" -I -c '
import sys
print("%d.%d.%d" % sys.version_info[:3])
print(getattr(sys, "_base_executable", sys.executable))
try:
    import ensurepip, venv
    print("complete")
except ImportError as error:
    print(error)
' </dev/null 2>/dev/null)"; then
        PROBE_PROBLEM="does not start"
        return 1
    fi
    local complete
    { read -r PROBE_VERSION; read -r PROBE_PATH; read -r complete; } <<<"$answer"
    if [[ ! $PROBE_VERSION =~ ^([0-9]+)\.([0-9]+)\.[0-9]+$ ]]; then
        PROBE_PROBLEM="is not Python"
        return 1
    fi
    if ((BASH_REMATCH[1] != 3 || BASH_REMATCH[2] < 12)); then
        PROBE_PROBLEM="is Python $PROBE_VERSION"
        return 1
    fi
    if [[ $complete != complete ]]; then
        PROBE_PROBLEM="is Python $PROBE_VERSION without its venv module ($complete)"
        return 1
    fi
}

# Prints the interpreters to try, one per line: those on the PATH, pyenv's versions, uv's.
_python_candidates() {
    local name root
    for name in python3.12 python3.13 python3 python; do
        type -aP "$name" || true
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null </dev/null || true)"; do
        if [[ -n $root && -d $root/versions ]]; then
            printf '%s\n' "$root"/versions/3.1[2-9]*/bin/python3
        fi
    done
    # Only uv's own: for others it looks along the PATH too, where a shim that does not start makes it give up.
    for name in 3.12 3.13; do
        UV_PYTHON_PREFERENCE=only-managed uv python find --no-project "$name" 2>/dev/null </dev/null || true
    done
}

# Sets PYTHON_ENV_BASE to the interpreter to use: MEGATRON_EXT_PYTHON when set, else 3.12 (what the tests run
# with), else 3.13, else a newer one. Returns 1 with a message when there is none.
find_python() {
    PYTHON_ENV_BASE=""
    if [[ -n ${MEGATRON_EXT_PYTHON:-} ]]; then
        if ! _probe_python "$MEGATRON_EXT_PYTHON"; then
            _env_fail "MEGATRON_EXT_PYTHON=$MEGATRON_EXT_PYTHON $PROBE_PROBLEM; it must name a working" \
                "Python >= 3.12 with the venv module (unset it to let the script search)"
            return 1
        fi
        PYTHON_ENV_BASE="$PROBE_PATH"
        _env_say "Python $PROBE_VERSION: $PYTHON_ENV_BASE (MEGATRON_EXT_PYTHON)"
        return 0
    fi

    local candidate tried="" rank best_rank=9 best_version=""
    while read -r candidate; do
        if [[ ! -x $candidate ]]; then
            continue
        fi
        if ! _probe_python "$candidate"; then
            tried+="    $candidate $PROBE_PROBLEM"$'\n'
            continue
        fi
        case "$PROBE_VERSION" in
            3.12.*) rank=1 ;;
            3.13.*) rank=2 ;;
            *) rank=3 ;;
        esac
        if ((rank < best_rank)); then
            best_rank=$rank best_version="$PROBE_VERSION" PYTHON_ENV_BASE="$PROBE_PATH"
        fi
        if ((best_rank == 1)); then
            break
        fi
    done < <(_python_candidates)

    if [[ -z $PYTHON_ENV_BASE ]]; then
        _env_fail "no Python >= 3.12 found (python3.12, python3.13, python3 on the PATH; pyenv; uv)."
        if [[ -n $tried ]]; then
            printf '  Tried:\n%s' "$tried" >&2
        fi
        cat >&2 <<'MESSAGE'
  Install one in any of these ways, then run the command again:
    a package manager:  apt-get install python3.12 python3.12-venv   (or dnf install python3.12, ...)
    pyenv:              pyenv install 3.12
    uv:                 uv python install 3.12
  A Python at another place: MEGATRON_EXT_PYTHON=/path/to/python3.12
MESSAGE
        return 1
    fi
    _env_say "Python $best_version: $PYTHON_ENV_BASE"
    if ((best_rank == 3)); then
        _env_say "note: tested with Python 3.12 and 3.13; Megatron may have to be compiled for $best_version"
    fi
}

# ------------------------------------------------------------------------------------------------------------
# The virtual environment
# ------------------------------------------------------------------------------------------------------------

# The stamp's lines. The root is in it because a moved or copied .venv still points at the old place.
_env_root_line() { printf 'root=%s\n' "$PYTHON_ENV_ROOT"; }
_env_inputs_line() {
    local sum
    sum="$(cd "$PYTHON_ENV_ROOT" && cat setup.py megatron_ext/extras.py constraints.txt | cksum)" || return 1
    printf 'inputs=%s extras=%s\n' "$sum" "$PYTHON_ENV_EXTRAS"
}

# Whether .venv was made completely, in this place, and its interpreter starts (and is the one that
# MEGATRON_EXT_PYTHON names, when that is set).
_env_is_whole() {
    if [[ ! -f $PYTHON_ENV_STAMP ]] || ! grep -qxF "$(_env_root_line)" "$PYTHON_ENV_STAMP"; then
        return 1
    fi
    if [[ -n ${MEGATRON_EXT_PYTHON:-} ]]; then
        _probe_python "$MEGATRON_EXT_PYTHON" || return 1
        grep -qxF "python=$PROBE_PATH" "$PYTHON_ENV_STAMP" || return 1
    fi
    _probe_python "$PYTHON_ENV_DIR/bin/python"
}

# Runs pip of .venv with its output in the log; shows the end of the log when it fails.
# --no-compile: byte code is written for the modules that are imported, not for all of torch and its tools.
_env_pip_install() {
    if ! "$PYTHON_ENV_DIR/bin/python" -I -m pip install --no-input --disable-pip-version-check --no-compile \
        --constraint constraints.txt "$@" >>"$PYTHON_ENV_LOG" 2>&1 </dev/null; then
        tail -n 15 "$PYTHON_ENV_LOG" >&2
        _env_fail "pip could not install the packages (whole log: $PYTHON_ENV_LOG)." \
            "Check the network and the disk (about 5 GB are needed), then run the command again"
        return 1
    fi
}

# Makes a new, empty .venv with PYTHON_ENV_BASE.
_env_create() {
    if [[ -e $PYTHON_ENV_DIR ]]; then
        _env_say ".venv is incomplete, was moved, or has another Python: making it again"
        rm -rf "$PYTHON_ENV_DIR"
    fi
    _env_say "creating .venv"
    mkdir -p "$PYTHON_ENV_DIR" && : >"$PYTHON_ENV_MARKER" || return 1
    if ! "$PYTHON_ENV_BASE" -I -m venv "$PYTHON_ENV_DIR" </dev/null; then
        _env_fail "$PYTHON_ENV_BASE could not make the virtual environment $PYTHON_ENV_DIR"
        return 1
    fi
}

# Installs into .venv and stamps it. setuptools comes first because the build of this package must use the
# pinned one of .venv instead of downloading another into a temporary place.
_env_install() {
    local base
    rm -f "$PYTHON_ENV_STAMP"
    _probe_python "$PYTHON_ENV_DIR/bin/python" || return 1
    base="$PROBE_PATH"
    _env_say "installing into .venv (the first time up to 3 GB are downloaded; log: $PYTHON_ENV_LOG)"
    _env_pip_install setuptools || return 1
    _env_pip_install --no-build-isolation --editable ".[$PYTHON_ENV_EXTRAS]" || return 1
    {
        _env_root_line
        printf 'python=%s\n' "$base"
        _env_inputs_line
    } >"$PYTHON_ENV_STAMP.new" && mv "$PYTHON_ENV_STAMP.new" "$PYTHON_ENV_STAMP"
}

# Brings .venv to the wanted state from whatever is there. Runs in the repository root, under the lock.
_env_make_or_reuse() {
    local start=$SECONDS
    if _env_is_whole; then
        if grep -qxF "$(_env_inputs_line)" "$PYTHON_ENV_STAMP"; then
            _env_say "reusing .venv (Python $PROBE_VERSION)"
            return 0
        fi
        _env_say "setup.py, megatron_ext/extras.py or constraints.txt changed: updating .venv"
    elif [[ ! -e $PYTHON_ENV_MARKER && -n "$(ls -A "$PYTHON_ENV_DIR" 2>/dev/null)" ]]; then
        _env_fail "$PYTHON_ENV_DIR was made by something else, so it is left alone;" \
            "move or remove it and run the command again"
        return 1
    else
        find_python || return 1
        _env_create || return 1
    fi
    _env_install || return 1
    _env_say "ready after $((SECONDS - start)) s"
}

# Makes .venv or reuses it. Two calls at the same time (the quickstart and the tests, say) take turns.
ensure_venv() {
    (
        cd "$PYTHON_ENV_ROOT" || exit 1
        if ! command -v flock >/dev/null; then
            _env_say "note: no flock command here, so run only one set-up at a time"
        elif ! flock -n 9; then
            _env_say "another set-up runs in this checkout: waiting for it"
            flock 9 || exit 1
        fi
        _env_make_or_reuse
    ) 9>"$PYTHON_ENV_ROOT/.venv.lock"
}

# Makes or reuses .venv and puts its commands first on the PATH of the calling script.
use_python_env() {
    ensure_venv || return 1
    # Images of containers set the latter to stay small. With it every process would compile all of torch and Megatron
    # again, which takes longer than what it was started for.
    unset PYTHONHOME PYTHONDONTWRITEBYTECODE
    export VIRTUAL_ENV="$PYTHON_ENV_DIR"
    export PATH="$PYTHON_ENV_DIR/bin:$PATH"
    hash -r
}
