#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks a device: conformance, the cache under captured graphs, a race hunt, copy bandwidth, the step's gap.
#
#   scripts/device_check.sh [--backend cuda|npu|cpu_sim] [--out report.json] [...]     (--help shows the rest)
#
# Needs Python 3.11 with torch for the device, numpy and stevedore. Nothing is installed: the source tree is used as it
# lies. On a machine without numpy or stevedore put their wheels into the folder DEVICE_CHECK_WHEELS names (default:
# .device-wheels in the repository). PYTHON chooses the interpreter, DEVICE_CHECK_TIMEOUT_S ends it (default 360).
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
wheels=${DEVICE_CHECK_WHEELS:-$repository/.device-wheels}
path=$repository/scripts:$repository:$repository/backends/cuda:$repository/backends/npu:$repository/backends/cpu_sim

if compgen -G "$wheels/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  for wheel in "$wheels"/*.whl; do
    "$python" -m zipfile -e "$wheel" "$site"
  done
  path=$path:$site
fi

for package in torch numpy stevedore; do
  if ! said=$(PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} "$python" -c "import $package" 2>&1); then
    printf 'device_check: %s cannot import %s: %s\nSet PYTHON to the interpreter that has torch for the device%s.\n' \
      "$python" "$package" "${said##*$'\n'}" ", and put wheels of numpy and stevedore into $wheels if it lacks them" >&2
    exit 2
  fi
done

PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} \
  timeout --signal=INT --kill-after=15 "${DEVICE_CHECK_TIMEOUT_S:-360}" "$python" -m device_check "$@"
