#!/usr/bin/env bash
# Pins requirements/*.in into requirements/*.txt. Needs scripts/install.sh to have run (it brings uv).
# The lists are complete, so that an installation needs no resolver. torch itself is pinned in
# scripts/install.sh, because which build to take depends on where it can be found.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"

compile() {
    .venv/bin/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links --override requirements/overrides.txt "$@"
}

compile requirements/cpu.in --no-emit-package torch -o requirements/cpu.txt "$@"
compile requirements/dev.in -c requirements/cpu.txt -o requirements/dev-all.txt "$@"
# Only what the CPU list does not bring already.
grep -vxFf requirements/cpu.txt requirements/dev-all.txt > requirements/dev.txt || true
rm requirements/dev-all.txt
compile requirements/light.in -c requirements/cpu.txt --universal -o requirements/light.txt "$@"
# The CUDA stack is resolved for the machines that it runs on.
.venv/bin/uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --override requirements/overrides-gpu.txt -c requirements/light.txt \
    requirements/gpu.in -o requirements/gpu.txt "$@"
