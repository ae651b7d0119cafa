"""What answers health must not wait for torch; the launcher must not import it at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("module", ["trainer_svc.service", "trainer_svc.rank", "trainer_svc.app"])
def test_the_launcher_and_the_serving_part_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
