#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the Python code of the sync service's protocol.
#
#   scripts/make_sync_protocol.sh [OUTPUT_FOLDER]     the repository itself unless given
#
# Needs grpcio-tools of the release below, which is not needed otherwise: the code that it makes runs with every later
# grpcio and protobuf, so it has to be as old as the lowest ones that setup.py allows.
#     python -m venv protocol-env && protocol-env/bin/pip install grpcio-tools==1.74.0
#     PYTHON=protocol-env/bin/python scripts/make_sync_protocol.sh

set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '4,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
esac
wanted=1.74.0
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if (($# > 1)) || [[ ! -d ${1:-$root} ]]; then
    echo "error: '$*' is not a folder; give one that is there, or nothing for the repository (--help tells more)" >&2
    exit 2
fi
output="$(cd -- "${1:-$root}" && pwd -P)"
python="${PYTHON:-python3}"

found="$("$python" -c 'from importlib.metadata import version; print(version("grpcio-tools"))' 2>/dev/null)" || found="none"
if [[ $found != "$wanted" ]]; then
    echo "error: $python has grpcio-tools $found; install grpcio-tools==$wanted, or set PYTHON to one that has it" >&2
    exit 2
fi

cd "$root"
"$python" -m grpc_tools.protoc --proto_path=. --python_out="$output" megatron_ext/sync_service/protocol/sync.proto
file="$output/megatron_ext/sync_service/protocol/sync_pb2.py"
{ echo "# SPDX-License-Identifier: Apache-2.0"; cat "$file"; } >"$file.new"
mv "$file.new" "$file"
