#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv when needed, then trains a small GPT with three strategies in every step, and with each of them alone.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

usage() {
    cat <<'TEXT'
Usage: examples/hot_switch/quickstart.sh [OPTIONS]

Trains a small GPT (4 processes) on the functions and classes of Python's standard library, which are short except for a few:
with hot switching between three strategies, and with each of them alone, on the same documents. It shows that the losses
are the same, and what switching moves. Speed on a CPU is not what it shows, although it is printed.
No GPU and no download of data are needed; the first start downloads the Python packages into .venv.

Options:
  --iterations N   length of a run (default 20, at least 4)
  --output DIR     folder for logs, summary.json, comparison.png (default outputs/hot_switch_quickstart in the
                   repository); files of an earlier quickstart in it are replaced
  --help           show this text

Environment:
  BACKEND               cpu: the only choice so far, and the default
  MEGATRON_EXT_PYTHON   the Python >= 3.12 with which .venv is made
TEXT
}

source "$root/scripts/lib/quickstart.sh"
check_names "--iterations --output" "$@"
[[ ${BACKEND:-cpu} == cpu ]] || fail "BACKEND=$BACKEND: this quickstart has run on CPU only; use BACKEND=cpu"
start_quickstart "$root/examples/hot_switch/quickstart.py" "$@"
