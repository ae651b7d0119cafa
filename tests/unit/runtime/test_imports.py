"""The room is light: no heavy package, and quick to import."""

from __future__ import annotations

import subprocess
import sys
import time
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
    times = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", CODE], check=True, cwd=ROOT, timeout=30)
        times.append(time.monotonic() - began)
    assert min(times) < 1.5
