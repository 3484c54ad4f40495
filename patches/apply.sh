#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the hook points of megatron_ext into a fork of Megatron: patches/README.md. --help tells the rest.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! python3 -c 'import sys, packaging; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    echo "patches/apply.sh: error: python3 on PATH must be 3.12 or newer and have the package 'packaging';" \
        "activate the environment of megatron_ext" >&2
    exit 2
fi
PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}" exec python3 -m megatron_ext.fork.apply_set --sets "$here" "$@"
