#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lists the corpora of a folder in a file, on which run_single_node.sh trains as on one (DATA_ARGS_PATH).
#
#   list_processed_files.sh DIR OUTPUT_FILE
#
# A corpus is PREFIX.bin and PREFIX.idx, in DIR or a folder in it; `megatron-ext data prepare` makes it, of the shards of
# tokenize_data.py, too (--format tokens).

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
refuse_options "$@"
(($# == 2)) || launch_error "takes DIR OUTPUT_FILE, but $# arguments were given"
find_python
exec python -m megatron_ext.cli.main data list "$1" --output "$2"
