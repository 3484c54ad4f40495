#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# HotSPa has a copy of this script beside its experiments: the same as ../llama_hot_switch.sh, whose --help tells all.

set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../llama_hot_switch.sh" "$@"
