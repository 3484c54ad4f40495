#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv when needed, then trains a small GPT on real text with stock Megatron and again with DiLoCo.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

usage() {
    cat <<'TEXT'
Usage: examples/quickstart.sh [OPTIONS]

Trains a small GPT (1.3M parameters, 4 processes) on the source code of Python's standard library: first with
stock Megatron-LM, synchronously, then with local SGD (DiLoCo, two workers), and resumes the latter from a
checkpoint. Compares losses, times and the traffic between the workers. No GPU and no download of data are needed;
the first start downloads the Python packages into .venv.

Options:
  --iterations N      length of a run (default 260, at least 12)
  --output DIR        folder for logs, summary.json, losses.png (default outputs/quickstart in the repository);
                      results of an earlier quickstart in it are replaced, its corpus is reused
  --backend BACKEND   auto (default): GPUs where there are at least two, else the CPU; cpu; cuda
  --help              show this text

Environment:
  MEGATRON_EXT_PYTHON   the Python >= 3.12 with which .venv is made
TEXT
}

source "$root/scripts/lib/quickstart.sh"
check_names "--iterations --output --backend" "$@"
start_quickstart "$root/examples/quickstart/quickstart.py" "$@"
