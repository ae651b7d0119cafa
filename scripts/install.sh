#!/usr/bin/env bash
# Creates .venv and installs Headrace into it, editable:  install.sh [KIND] [PART]
#   KIND  full (default): the CPU stack and the tools for development; cpu: the CPU stack;
#         gpu: the CUDA stack; light: what the services without torch need
#   PART  all (default); packages: everything but Headrace itself, from requirements/ alone
# Idempotent: a stamp over everything that decides the result makes a repeated call instant.
# Nothing is resolved: the lists in requirements/ are complete, so every step uses --no-deps.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly KIND="${1:-full}"
readonly PART="${2:-all}"
readonly TORCH=2.13.0
readonly UV=0.13.9
readonly PYTHON=.venv/bin/python
readonly STAMP=.venv/.headrace-installed

say() { printf 'install: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

case "$KIND" in
    full) version=3.11 lists=(requirements/cpu.txt requirements/dev.txt) ;;
    cpu) version=3.11 lists=(requirements/cpu.txt) ;;
    light) version=3.11 lists=(requirements/light.txt) ;;
    gpu) version=3.12 lists=(requirements/gpu.txt) ;;
    *) die "unknown kind $KIND: full, cpu, gpu or light" ;;
esac
case "$PART" in all | packages) ;; *) die "unknown part $PART: all or packages" ;; esac
readonly version lists

inputs_digest() {
    { printf '%s\n' "$KIND"; cat scripts/install.sh "${lists[@]}" pyproject.toml <(pwd -P); } | sha256sum | cut -d ' ' -f 1
}

find_python() {
    local candidate
    for candidate in "${HEADRACE_PYTHON:-}" "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python python3; do
        if [ -n "$candidate" ] && [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python $version found: install python$version with its venv module, or name one in HEADRACE_PYTHON"
}

create_venv() {
    if [ ! -x "$PYTHON" ] || ! "$PYTHON" -c 'import pip' 2>/dev/null; then
        local python
        python="$(find_python)"
        say "creating .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "uv==$UV"
}

# uv is about ten times faster than pip but does not read pip's settings: hand it pip's wheel folders.
use_pip_wheel_folders() {
    local folders
    folders="${PIP_FIND_LINKS:-$("$PYTHON" -m pip config get global.find-links 2>/dev/null || true)}"
    if [ -n "$folders" ]; then
        export UV_FIND_LINKS="${UV_FIND_LINKS:-$(printf '%s' "$folders" | tr -s ' \n' ',')}"
    fi
}

uv_install() { .venv/bin/uv pip install --quiet --no-deps --python "$PYTHON" "$@"; }
pip_install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }

# The CPU build of torch is not on the package index under its plain name. A wheel at hand comes
# first; the second way asks the index that uv knows for CPU builds.
install_torch() {
    case "$KIND" in light | gpu) return ;; esac
    local installed
    installed="$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)"
    [ "$installed" = "$TORCH+cpu" ] && return
    say "installing torch $TORCH+cpu"
    uv_install "torch==$TORCH+cpu" 2>/dev/null \
        || pip_install --timeout 15 --retries 1 "torch==$TORCH+cpu" 2>/dev/null \
        || uv_install --torch-backend=cpu "torch==$TORCH" \
        || die "torch $TORCH+cpu not found: put its wheel in a folder and name that folder in PIP_FIND_LINKS"
}

install_pinned() {
    local arguments=() list
    for list in "${lists[@]}"; do arguments+=(-r "$list"); done
    say "installing $(cat "${lists[@]}" | grep -c ==) pinned packages"
    uv_install "${arguments[@]}" || pip_install "${arguments[@]}"
}

# The compatible mode puts the repository root on the path, so that a new top-level package is found
# without another installation and type checkers see the sources.
install_headrace() {
    [ -d services ] || die "the sources are not here"
    uv_install "setuptools>=77"
    pip_install --no-build-isolation --config-settings editable_mode=compat -e .
}

# vLLM imports thousands of modules in several processes at once: compile them once, here.
byte_compile() {
    "$PYTHON" -m compileall -q -j 0 -x '/(test|tests|templates)/' ".venv/lib/python$version/site-packages" >/dev/null 2>&1 || true
}

digest="$(inputs_digest)"
if [ -x "$PYTHON" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$digest" ]; then
    exit 0
fi
started=$SECONDS
create_venv
use_pip_wheel_folders
install_torch
install_pinned
if [ "$PART" = packages ]; then
    byte_compile
    exit 0
fi
install_headrace
byte_compile
printf '%s\n' "$digest" > "$STAMP"
say "done in $((SECONDS - started)) s"
