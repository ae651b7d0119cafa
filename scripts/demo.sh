#!/usr/bin/env bash
# The demo: warm-start a small model, train it with GRPO through every service, show what it learned.
set -euo pipefail
cd "$(dirname "$0")/.."

SEED="${SEED:-0}"
RECIPE="recipes/tiny/arithmetic${ASYNC:+-async}.yaml"

scripts/install.sh
.venv/bin/python recipes/tiny/prepare.py --out build/tiny --seed "$SEED"
.venv/bin/headrace run recipes/tiny/arithmetic-warmup.yaml "sft.seed=$SEED"
.venv/bin/headrace run "$RECIPE" "grpo.seed=$SEED"
.venv/bin/python scripts/demo_report.py
