#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The same as convert_model_to_hf_unshard.sh, under the name that SPES' documents have for it.

exec "$(dirname "${BASH_SOURCE[0]}")/convert_model_to_hf_unshard.sh" "$@"
