"""The room is light: no heavy package, and quick to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import importlib, pkgutil, sys
import services.runtime
for module in pkgutil.iter_modules(services.runtime.__path__, "services.runtime."):
    importlib.import_module(module.name)
heavy = {"torch", "vllm", "transformers"} & set(sys.modules)
raise SystemExit(f"imported {heavy}" if heavy else 0)
"""


def test_imports_nothing_heavy_and_is_quick() -> None:
    before = os.times()
    subprocess.run([sys.executable, "-c", CODE], check=True, cwd=ROOT, timeout=60)
    after = os.times()
    # CPU time: a loaded machine stretches the clock, not the work.
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 1.5
