#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The name that SPES' documents have for it: see convert_model_to_hf_unshard.sh.

exec "$(dirname "${BASH_SOURCE[0]}")/convert_model_to_hf_unshard.sh" "$@"
