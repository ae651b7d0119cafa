"""Router and engine host stay light, and everything but the launch of vLLM can be imported without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        "rollout_svc.service",
        "rollout_svc.engine.service",
        "rollout_svc.engine.worker",
        "rollout_svc.engine.turns",
    ],
)
def test_importing_it_imports_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
