#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Looks for known vulnerabilities of the versions in constraints.txt, with pip-audit.
#
#   scripts/audit_dependencies.sh [REQUIREMENTS_FILE]     constraints.txt unless given
#
# Exit code 0: none is known of any of them. 1: some are, and are listed. 2: they could not all be looked up, for
# instance because the vulnerability service cannot be reached from here; so it belongs to a job of its own.
# PIP_AUDIT names another pip-audit than the one that is installed; SERVICE the service that is asked, osv or pypi:
#     python -m venv audit-env && audit-env/bin/pip install pip-audit
#     PIP_AUDIT=audit-env/bin/pip-audit SERVICE=pypi scripts/audit_dependencies.sh

set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '4,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
requirements="${1:-$root/constraints.txt}"
audit="${PIP_AUDIT:-pip-audit}"
if [[ ! -r $requirements ]]; then
    echo "error: $requirements cannot be read; give a file with one NAME==VERSION a line" >&2
    exit 2
fi
if ! command -v "$audit" >/dev/null; then
    echo "error: $audit is not here; install pip-audit, or set PIP_AUDIT to one" >&2
    exit 2
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

# pip-audit takes what its service does not know for what has no vulnerability, and ends with 0: look at its report.
"$audit" --vulnerability-service "${SERVICE:-osv}" --requirement "$requirements" --no-deps --disable-pip \
    --progress-spinner off --format json --output "$folder/report.json" >"$folder/said" 2>&1 || true
if [[ ! -s $folder/report.json ]]; then
    echo "error: nothing could be looked up: $(tail -n 1 "$folder/said")" >&2
    exit 2
fi
python3 - "$folder/report.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    found = json.load(file)["dependencies"]
unknown = [entry["name"] for entry in found if "skip_reason" in entry]
hit = [(entry, vulnerability) for entry in found for vulnerability in entry.get("vulns", ())]
for entry, vulnerability in hit:
    fixed = ", ".join(vulnerability["fix_versions"]) or "none"
    print(f"{entry['name']} {entry['version']}: {vulnerability['id']}; versions with a fix: {fixed}")
if unknown:
    names = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    print(f"error: {len(unknown)} of {len(found)} could not be looked up: {names}", file=sys.stderr)
if not hit and not unknown:
    print(f"no vulnerability is known of these {len(found)} versions")
sys.exit(1 if hit else 2 if unknown or not found else 0)
PYTHON
