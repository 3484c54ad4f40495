#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv when needed, then trains a mixture of experts with a sync server and four SPES peers on this machine.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

usage() {
    cat <<'TEXT'
Usage: examples/spes/quickstart.sh [OPTIONS]

Trains a small GPT with 16 experts per layer on the source code of Python's standard library: a sync server and four
peers, one process each, of which every one trains four of the experts (SPES). During the run a peer is killed and resumes
from its checkpoint, and the server is killed and started again. Checks that all peers end with the same bits; prints
losses, bytes, memory and what happened. No GPU and no download of data are needed; the first start downloads the Python
packages into .venv.

Options:
  --iterations N   length of the run (default 400): a multiple of 25, the steps between two rounds; at least 100
  --output DIR     folder for logs, summary.json, quickstart.png (default outputs/spes/quickstart in the repository);
                   results of an earlier quickstart in it are replaced, its corpus is reused
  --help           show this text

Environment:
  BACKEND               cpu: the only choice so far, and the default
  MEGATRON_EXT_PYTHON   the Python >= 3.12 with which .venv is made
TEXT
}

source "$root/scripts/lib/quickstart.sh"
check_names "--iterations --output" "$@"
[[ ${BACKEND:-cpu} == cpu ]] || fail "BACKEND=$BACKEND: this quickstart has run on CPU only; use BACKEND=cpu"
start_quickstart "$root/examples/spes/quickstart.py" "$@"
