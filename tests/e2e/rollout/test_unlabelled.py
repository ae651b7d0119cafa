"""In-flight updates of a vLLM that does not say which weights sampled a token: broken off and continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_svc.engine.environment import worker_environment

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]
ROOT = Path(__file__).parents[3]


def test_broken_off_turns_go_on_under_the_new_weights_from_their_exact_ids(model_dir):
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.rollout.unlabelled_driver", str(model_dir)],
        capture_output=True, text=True, timeout=140, cwd=ROOT, env=worker_environment(threads=1),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-1000:] + done.stderr[-3000:]
    facts = json.loads(lines[0].removeprefix("RESULT "))
    assert facts["waiting"] > 0
    assert facts["versions"].count([0, 1]) == facts["waiting"]
    assert facts["worst"] < 1e-4
